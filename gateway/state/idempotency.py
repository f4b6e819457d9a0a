"""Replies stored under the caller's idempotency key: the interface of the stores."""

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

KEEP_S: Final = 24 * 3600.0  # how long a reply is stored, in seconds
CLAIM_S: Final = 10.0  # seconds after which a claim that is not renewed is void: its gateway has ended
ENTRY_BYTES: Final = 1_024
"""Bytes of a reply besides its body, including indexes; thus a limit of bytes also limits the number."""


class Claim(NamedTuple):
    """What one request with an idempotency key holds while it runs: its own token, and its fingerprint."""

    token: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A whole HTTP reply."""

    status: int
    content_type: str
    body: bytes

    @property
    def size(self) -> int:
        """The bytes that count towards :class:`ReplyBounds`."""
        return ENTRY_BYTES + len(self.body)


@dataclass(frozen=True, slots=True)
class ReplyBounds:
    """The most bytes of one reply, of a tenant's replies, and of all replies; a larger reply is not stored.

    Beyond ``tenant``, the tenant's oldest replies are dropped; beyond ``all``, the oldest ones of the tenant
    with the most bytes.
    """

    reply: int = 1024 * 1024
    tenant: int = 32 * 1024 * 1024
    all: int = 256 * 1024 * 1024


class IdempotencyStore(Protocol):
    """Replies stored for 24 hours under (tenant, key), within :class:`ReplyBounds`.

    Operations raise StateUnavailable. The HTTP edge refuses a request whose reply cannot be looked up, and
    answers one whose reply cannot be stored.
    """

    async def close(self) -> None:
        """Close connections."""

    async def get(
        self, tenant: str, key: str, claim: Claim, *, reads_only: bool = False
    ) -> tuple[str, StoredReply | None] | None:
        """Return the fingerprint of the request's body and the reply, if there is one.

        Without a reply, ``claim`` is stored for ``CLAIM_S`` by the store's clock, unless ``reads_only``; if
        the key has another claim, its fingerprint is returned, without a reply.
        """

    async def renew(self, tenant: str, key: str, claim: Claim) -> None:
        """Renew a claim that is not void."""

    async def release(self, tenant: str, key: str, claim: Claim) -> None:
        """Delete the claim, unless the key has another one."""

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> bool:
        """Store a reply unless the key has one that has not expired. ``False``: the reply is too large."""
