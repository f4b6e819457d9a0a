"""What a backend has told of itself, and how far that is believed as it grows old.

The last good word stays in use: first as it is, then with a margin on the memory that grows, and after
``stale_s`` with a cap on the requests in flight. A silent backend is asked less, never not at all.
"""

from __future__ import annotations

from admission.forecast import KvPoolTokens
from admission.values import AdmissionLimits, BackendLoad


class LoadSignals:
    """One backend's last word.

    Args:
        limits: how long a word is believed.

    Attributes:
        workers: engines behind the name that work side by side; at least one.
    """

    __slots__ = ("_just_left", "_limits", "_told_at", "load", "pool", "workers")

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.load: BackendLoad | None = None
        self.pool = KvPoolTokens()
        self.workers = 1
        self._told_at = float("-inf")
        self._just_left = 0  # sequences released since: the backend may still count them

    def told(self, load: BackendLoad, now: float) -> None:
        """It has told its load; the size of its pool stays known when this word does not name it."""
        self.load, self._told_at, self._just_left = load, now, 0
        self.workers = max(1, load.workers)
        if load.total_blocks and load.block_size:
            self.pool = KvPoolTokens(load.total_blocks, load.block_size)

    def left(self, sequences: int, since: float) -> None:
        """So many of our sequences, handed on at ``since``, have ended: if it told of them, it still does."""
        if since < self._told_at:
            self._just_left += sequences

    @property
    def waiting(self) -> int:
        """Sequences in its own queue."""
        return self.load.waiting if self.load is not None else 0

    def foreign(self, ours: int) -> int:
        """Sequences there that are none of ours: other gateways', other callers'."""
        if self.load is None:
            return 0
        return max(0, self.load.running + self.load.waiting - ours - self._just_left)

    def silent_s(self, now: float) -> float:
        """How long it has said nothing; 0 for one that never tells."""
        return max(0.0, now - self._told_at) if self.load is not None else 0.0

    def kv_usage(self, now: float, *, busy: bool) -> float:
        """Its KV usage, with a margin that grows while it should tell and does not."""
        if self.load is None:
            return 0.0
        silent_s = self.silent_s(now) if busy else 0.0
        if silent_s <= self._limits.fresh_s:
            return self.load.kv_usage
        return self.load.kv_usage + self._limits.stale_margin * min(1.0, silent_s / self._limits.stale_s)

    def capacity(self, limit: int, now: float, *, busy: bool) -> int:
        """Sequences that may be in flight, at most ``limit``, at least one."""
        if busy and self.silent_s(now) > self._limits.stale_s:
            limit = min(limit, self._limits.stale_in_flight * self.workers)
        return max(1, limit)
