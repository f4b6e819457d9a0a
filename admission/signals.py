"""A backend's reported load, and how it is used as it ages.

The last report stays in use: at first as it is, then with a growing margin on the memory, and after
``stale_s`` with a cap on the requests in flight. A silent backend gets fewer requests, but never none.
"""

from admission.forecast import KvPoolTokens
from admission.values import AdmissionLimits, BackendLoad


class LoadSignals:
    """One backend's last report; ``workers`` engines share the name, at least one."""

    __slots__ = ("_ended_since_report", "_limits", "_reported_at", "load", "pool", "waiting", "workers")

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.load: BackendLoad | None = None
        self.pool = KvPoolTokens()
        self.workers = 1
        self.waiting = 0  # sequences in the backend's own queue
        self._reported_at = float("-inf")
        self._ended_since_report = 0  # sequences released since the report: the backend may still count them

    def report(self, load: BackendLoad, now: float) -> None:
        """Store a report; the size of the pool stays known when the report lacks it."""
        self.load, self._reported_at, self._ended_since_report = load, now, 0
        self.workers = max(1, load.workers)
        self.waiting = load.waiting
        if load.total_blocks and load.block_size:
            self.pool = KvPoolTokens(load.total_blocks, load.block_size)

    def sequences_ended(self, sequences: int, since: float) -> None:
        """Count ended ``sequences``, handed on at ``since``, that the last report may still include."""
        if since < self._reported_at:
            self._ended_since_report += sequences

    def foreign(self, ours: int) -> int:
        """Sequences in the engine of other gateways and other callers."""
        if self.load is None:
            return 0
        return max(0, self.load.running + self.load.waiting - ours - self._ended_since_report)

    def silent_s(self, now: float) -> float:
        """Seconds since the last report; 0 for a backend that never reports."""
        return max(0.0, now - self._reported_at) if self.load is not None else 0.0

    def kv_usage(self, now: float, *, busy: bool) -> float:
        """The backend's KV usage, with a margin that grows while a busy backend does not report."""
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
