"""Replies in memory: for ``memory://`` and for tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from gateway.state.idempotency import KEEP_S, MAX_REPLIES
from gateway.state.idempotency_values import StoredReply


class MemoryIdempotencyStore:
    """Keeps replies until the process ends.

    Args:
        unix_time: seconds since 1970.
        max_replies: the oldest beyond it go.
    """

    healthy: Final = True

    def __init__(self, *, unix_time: Callable[[], float], max_replies: int = MAX_REPLIES) -> None:
        self._unix_time = unix_time
        self._max_replies = max_replies
        self._kept: OrderedDict[tuple[str, str], tuple[float, str, StoredReply]] = OrderedDict()

    async def open(self) -> None:
        """Nothing to prepare."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def get(self, tenant: str, key: str) -> tuple[str, StoredReply] | None:
        """The body's fingerprint and the reply, when kept within the last 24 h."""
        found = self._kept.get((tenant, key))
        if found is None or found[0] < self._unix_time() - KEEP_S:
            return None
        return found[1], found[2]

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> None:
        """Keep a reply; the first one under a key stays unless it has expired."""
        if await self.get(tenant, key) is not None:
            return
        self._kept[tenant, key] = (self._unix_time(), fingerprint, reply)
        self._kept.move_to_end((tenant, key))
        while len(self._kept) > self._max_replies:
            self._kept.popitem(last=False)
