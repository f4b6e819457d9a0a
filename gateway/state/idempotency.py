"""Replies stored under the caller's idempotency key: what every store guarantees."""

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
