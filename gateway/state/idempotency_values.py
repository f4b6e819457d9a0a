"""Answers stored under an idempotency key, and the store's port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A whole HTTP answer kept under an idempotency key."""

    status: int
    content_type: str
    body: bytes


class IdempotencyStore(Protocol):
    """Answers kept for 24 h under (tenant, key); bounded, oldest dropped first."""

    async def get(self, tenant: str, key: str) -> tuple[str, StoredReply] | None:
        """The body's fingerprint and the stored reply."""

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> None:
        """Keep a reply."""
