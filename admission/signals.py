"""A backend's reported load, and how it is used as it ages.

The last report stays in use: at first as it is, then with a growing margin on the memory, and after
``stale_s`` with a cap on the requests in flight (``InFlightWork.capacity``). A silent backend gets fewer
requests, but never none.
"""

from admission.forecast import KvPoolTokens
from admission.values import AdmissionLimits, BackendLoad


class LoadSignals:
    """One backend's last report; ``workers`` engines share the name, at least one.

    ``sequences`` are those of the report, without our own that have ended since then.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.load: BackendLoad | None = None
        self.pool = KvPoolTokens()
        self.workers = 1
        self.waiting = 0  # sequences in the backend's own queue
        self.sequences = 0
        self.reported_at = float("-inf")

    def report(self, load: BackendLoad, now: float) -> None:
        """Store a report; the size of the pool stays known when the report lacks it."""
        self.load, self.reported_at = load, now
        self.workers = max(1, load.workers)
        self.waiting = load.waiting
        self.sequences = load.running + load.waiting
        if load.total_blocks and load.block_size:
            self.pool = KvPoolTokens(load.total_blocks, load.block_size)

    def silent_s(self, now: float) -> float:
        """Seconds since the last report; 0 for a backend that never reports."""
        return max(0.0, now - self.reported_at) if self.load is not None else 0.0

    def kv_usage(self, now: float, *, busy: bool) -> float:
        """The backend's KV usage, with a margin that grows while a busy backend does not report."""
        if self.load is None:
            return 0.0
        silent_s = self.silent_s(now) if busy else 0.0
        if silent_s <= self._limits.fresh_s:
            return self.load.kv_usage
        return self.load.kv_usage + self._limits.stale_margin * min(1.0, silent_s / self._limits.stale_s)
