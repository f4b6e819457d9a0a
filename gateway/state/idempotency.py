"""Answers kept under the caller's idempotency key: what every such store holds to."""

from __future__ import annotations

from typing import Final, Protocol

from gateway.state.idempotency_values import IdempotencyStore

KEEP_S: Final = 24 * 3600.0
"""How long a reply is stored."""
MAX_REPLIES: Final = 100_000
"""Bounds a store: the oldest go first."""


class IdempotencyKeeper(IdempotencyStore, Protocol):
    """A store with a life of its own.

    Invariants: the first reply under a key stays until it has expired; replies older than ``KEEP_S`` are not
    given out. An operation that fails raises; the HTTP edge decides what that means for the caller (it
    refuses when it cannot look, and answers when it cannot keep).
    """

    @property
    def healthy(self) -> bool:
        """Whether the last operation succeeded; true before the first."""

    async def open(self) -> None:
        """Prepare; a store that is not reachable now is tried again with each request."""

    async def close(self) -> None:
        """Let go of connections."""
