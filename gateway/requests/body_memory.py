"""Limits the memory of request bodies, in total and per tenant."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from gateway.errors import GatewayError, RateLimited

UNCOUNTED_BYTES: Final = 65_536
"""A body up to this size is not counted: the server buffers as much for any connection."""
BODIES: Final = 64  # how many of the longest bodies fit into the default limit: 256 MiB
RECORDINGS: Final = 16  # how many of the longest recordings may be on the disk: 400 MiB by default
UPLOADS: Final = 4
"""How many of the longest uploads may be on the disk until they are stored: 800 MiB by default."""
_RETRY_AFTER_MS: Final = 1_000


class TooManyBodies(GatewayError, status=503, code="queue_full"):
    """The bodies of all requests together exceed ``server.max_bodies_bytes``."""


class BodyMemory:
    """Counts the bytes of large bodies, from their arrival to the end of their requests.

    A tenant's share is half of ``most_bytes``.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._share_bytes = most_bytes // 2
        self._owned: Counter[str] = Counter()
        self.held_bytes = 0

    def hold(self, owner: str, size: int) -> None:
        """Count ``size`` bytes. Raises TooManyBodies or RateLimited without counting."""
        if self._owned[owner] + size > self._share_bytes:
            raise RateLimited(
                f"the bodies of your requests in progress are over {self._share_bytes} bytes",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        if self.held_bytes + size > self._most_bytes:
            raise TooManyBodies(
                "the bodies of all requests in progress take too much memory", retry_after_ms=_RETRY_AFTER_MS
            )
        self._owned[owner] += size
        self.held_bytes += size

    @contextmanager
    def holding(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes which a request reads besides its body, until the block ends."""
        held = 0

        def more(size: int) -> None:
            nonlocal held
            self.hold(owner, size)
            held += size

        try:
            yield more
        finally:
            if held:
                self.release(owner, held)

    def release(self, owner: str, size: int) -> None:
        """Subtract ``size`` bytes that :meth:`hold` counted."""
        self.held_bytes -= size
        self._owned[owner] -= size
        if not self._owned[owner]:
            del self._owned[owner]
