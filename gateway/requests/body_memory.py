"""The sum of request bodies in memory, and each tenant's part of it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from gateway.errors import GatewayError

UNCOUNTED_BYTES: Final = 65_536
"""A body up to this size is not counted: the server buffers as much of any connection."""
BODIES: Final = 64
"""The longest bodies that memory has room for, unless configured: 256 MiB."""
RECORDINGS: Final = 16
"""The longest recordings that the disk has room for: 400 MiB."""
UPLOADS: Final = 4
"""The longest files that the disk has room for until they are stored: 800 MiB."""
_RETRY_AFTER_MS: Final = 1_000


class TooManyBodies(GatewayError, status=503, code="queue_full"):
    """The bodies of all requests together are over ``server.max_bodies_bytes``."""


class TooManyOwnBodies(GatewayError, status=429, code="rate_limited"):
    """The bodies of one tenant's requests are over its share: half of ``server.max_bodies_bytes``."""


class BodyMemory:
    """Counts the bytes of large bodies, from their arrival to the end of their requests."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._share_bytes = most_bytes // 2
        self._owned: Counter[str] = Counter()
        self.held_bytes = 0

    def hold(self, owner: str, size: int) -> None:
        """Count ``size`` bytes. Raises TooManyBodies or TooManyOwnBodies, and counts nothing then."""
        if self._owned[owner] + size > self._share_bytes:
            raise TooManyOwnBodies(
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
        """What a request reads besides its body: each call counts more bytes, until the block ends."""
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
        """The inverse of :meth:`hold`."""
        self.held_bytes -= size
        self._owned[owner] -= size
        if not self._owned[owner]:
            del self._owned[owner]
