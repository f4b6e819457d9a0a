"""The number of sequences that a backend should run, learned from how fast it serves them.

A larger batch means more tokens a second and a longer time between two tokens of each. The limit grows while
answers keep to the route's SLO and the batch is full, and shrinks when they do not (additive increase,
multiplicative decrease, as in Netflix' concurrency-limits). That alone settles where about one answer in ten
is late; the pace of the requests in flight (``admission.pace``) lowers the limit until hardly any is.

Where several engines share a name, an answer moves the limit by one engine's share. Otherwise one late answer
in a hundred would halve the work of a hundred engines within seconds (docs/fleet-simulation.md).
"""

BACKOFF = 0.9
# After a decrease the next one waits this long for its effect; an increase needs as many good answers as the
# limit.
SETTLE_S = 2.0
FULL_SHARE = 0.9  # the limit grows only while at least this share of it is in use
# One window's pace lowers the limit to no less than this share of it, so that noise costs little.
LEAST_SHARE = 0.7


class AdaptiveLimit:
    """AIMD on time per output token and to the first token, between 1 and ``most``
    (``max_num_seqs``)."""

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._value = float(self._most)
        self._good = 0
        self._allowed = float("inf")
        self._shrunk_at = float("-inf")

    @property
    def value(self) -> int:
        """Sequences that may be in flight."""
        return int(self._value)

    def bound(self, most: int) -> None:
        """Set the engine's own bound, when it becomes known or changes."""
        if most == self._most:
            return
        was_full = self._value >= self._most
        self._most = max(1, most)
        self._value = float(self._most) if was_full else min(self._value, float(self._most))

    def paced(self, allowed: float, sequences: float) -> None:
        """Lower the limit towards ``allowed``, which by the pace of ``sequences`` would meet the targets."""
        self._allowed = allowed
        if allowed < sequences and allowed < self._value:
            self._value = max(1.0, allowed, self._value * LEAST_SHARE)

    def record(self, *, in_slo: bool, in_flight: int, now: float, workers: int = 1) -> None:
        """Learn whether an answer of one of the ``workers`` engines met its targets."""
        if not in_slo:
            self._good = 0
            if now - self._shrunk_at >= SETTLE_S / workers:
                self._shrunk_at = now
                # From the real load: a limit far above it would take many steps to have an effect.
                to = min(self._value, float(in_flight)) * BACKOFF
                self._value = max(1.0, self._value + (to - self._value) / workers)
            return
        if in_flight < self._value * FULL_SHARE or self._allowed <= self._value:
            return
        self._good += 1
        if self._good >= self._value / workers:
            self._good = 0
            self._value = min(float(self._most), self._value + 1.0)
