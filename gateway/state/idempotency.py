"""Replies stored under the caller's idempotency key: what every store guarantees, and the one in memory."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

KEEP_S: Final = 24 * 3600.0
"""How long a reply is stored."""
MAX_REPLIES: Final = 100_000
"""Bounds a store: the oldest replies are dropped first."""


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A whole HTTP reply."""

    status: int
    content_type: str
    body: bytes


class IdempotencyStore(Protocol):
    """Replies stored for 24 hours under (tenant, key); bounded, oldest dropped first.

    Operations raise StateUnavailable. The HTTP edge then refuses the request when it cannot read, and answers
    it when it cannot write.
    """

    async def close(self) -> None:
        """Close connections."""

    async def get(self, tenant: str, key: str) -> tuple[str, StoredReply] | None:
        """The fingerprint of the request's body, and the reply."""

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> None:
        """Store a reply; the first one under a key stays until it has expired."""


class MemoryIdempotencyStore:
    """Stores replies until the process ends: for ``memory://`` and for tests."""

    def __init__(self, *, unix_time: Callable[[], float], max_replies: int = MAX_REPLIES) -> None:
        self._unix_time = unix_time
        self._max_replies = max_replies
        self._replies: OrderedDict[tuple[str, str], tuple[float, str, StoredReply]] = OrderedDict()

    async def close(self) -> None:
        """Nothing to close."""

    async def get(self, tenant: str, key: str) -> tuple[str, StoredReply] | None:
        """The body's fingerprint and the reply, when stored within the last 24 hours."""
        found = self._replies.get((tenant, key))
        if found is None or found[0] < self._unix_time() - KEEP_S:
            return None
        return found[1], found[2]

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> None:
        """Store a reply; the first one under a key stays until it has expired."""
        if await self.get(tenant, key) is not None:
            return
        self._replies[tenant, key] = (self._unix_time(), fingerprint, reply)
        self._replies.move_to_end((tenant, key))
        while len(self._replies) > self._max_replies:
            self._replies.popitem(last=False)
