"""Replies stored under the caller's idempotency key: what every store guarantees, and the one in memory."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

KEEP_S: Final = 24 * 3600.0
"""How long a reply is stored."""
ENTRY_BYTES: Final = 1_024
"""What a reply takes besides its body, indexes included; so the bounds of bytes bound the number too."""


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A whole HTTP reply."""

    status: int
    content_type: str
    body: bytes

    @property
    def size(self) -> int:
        """What it takes of the bounds."""
        return ENTRY_BYTES + len(self.body)


@dataclass(frozen=True, slots=True)
class ReplyBounds:
    """Bytes of one reply, of a tenant's, and of all; a larger reply is not stored.

    Beyond a tenant's, its oldest replies are dropped; beyond the bytes of all, the oldest of the tenant that
    has most.
    """

    reply: int = 1024 * 1024
    tenant: int = 32 * 1024 * 1024
    all: int = 256 * 1024 * 1024


class IdempotencyStore(Protocol):
    """Replies stored for 24 hours under (tenant, key), within :class:`ReplyBounds`.

    Operations raise StateUnavailable. The HTTP edge then refuses the request when it cannot read, and answers
    it when it cannot write.
    """

    async def close(self) -> None:
        """Close connections."""

    async def get(self, tenant: str, key: str) -> tuple[str, StoredReply] | None:
        """The fingerprint of the request's body, and the reply."""

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> bool:
        """Store a reply; the first one under a key stays until it has expired. ``False``: it is too large."""


class MemoryIdempotencyStore:
    """Stores replies until the process ends: for ``memory://`` and for tests."""

    def __init__(self, *, unix_time: Callable[[], float], bounds: ReplyBounds | None = None) -> None:
        self._unix_time = unix_time
        self._bounds = bounds or ReplyBounds()
        # By tenant, oldest first.
        self._replies: dict[str, OrderedDict[str, tuple[float, str, StoredReply]]] = {}
        self._bytes: dict[str, int] = {}

    async def close(self) -> None:
        """Nothing to close."""

    async def get(self, tenant: str, key: str) -> tuple[str, StoredReply] | None:
        """The body's fingerprint and the reply, when stored within the last 24 hours."""
        own = self._replies.get(tenant)
        found = None if own is None else own.get(key)
        if found is None or found[0] < self._unix_time() - KEEP_S:
            return None
        return found[1], found[2]

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> bool:
        """Store a reply; the first one under a key stays until it has expired. ``False``: it is too large."""
        if reply.size > self._bounds.reply:
            return False
        if await self.get(tenant, key) is not None:
            return True
        for each in list(self._replies):
            while self._replies.get(each) and self._oldest(each)[1] < self._unix_time() - KEEP_S:
                self._drop(each, self._oldest(each)[0])
        own = self._replies.setdefault(tenant, OrderedDict())
        own[key] = (self._unix_time(), fingerprint, reply)
        self._bytes[tenant] = self._bytes.get(tenant, 0) + reply.size
        while self._bytes[tenant] > self._bounds.tenant:
            self._drop(tenant, self._oldest(tenant)[0])
        while sum(self._bytes.values()) > self._bounds.all:
            most = max(self._bytes, key=self._bytes.__getitem__)
            self._drop(most, self._oldest(most)[0])
        return True

    def _oldest(self, tenant: str) -> tuple[str, float]:
        """Its key, and when it was stored."""
        key = next(iter(self._replies[tenant]))
        return key, self._replies[tenant][key][0]

    def _drop(self, tenant: str, key: str) -> None:
        _, _, reply = self._replies[tenant].pop(key)
        self._bytes[tenant] -= reply.size
        if not self._replies[tenant]:
            del self._replies[tenant], self._bytes[tenant]
