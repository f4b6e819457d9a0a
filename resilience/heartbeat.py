"""The longest time that an engine with work may take for a step, from its own step times. Sans I/O.

The limit is the largest of 2 s, five times the 99th percentile of its decode steps, and five times the
expected time of the prompt tokens that its current step may compute: a long prefill is one step. The
configured limit is the upper bound, and holds until the step times are known.
"""

from collections import deque
from math import ceil

# The least limit: a machine with far more work than cores may delay a step for more than a second.
LEAST_LIMIT_S = 2.0
# A step may take its usual duration times this; the last steps of a long prompt take longer, too.
FACTOR = 5.0
# Decode steps needed for a percentile; kernels are compiled within the first ones.
KNOWN_STEPS = 50
REMEMBERED_STEPS = 500
# Prefill steps from which the time per prompt token is computed. Short prompts say little about long ones.
REMEMBERED_PREFILLS = 100
LEAST_PREFILL_TOKENS = 16
# Only prefills of at least this share of the longest remembered one count: fixed costs hide the rate.
LONG_PREFILL = 0.25


class Heartbeat:
    """The step times of one engine; ``longest_s`` is the configured limit."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._decodes_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._prefills: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_PREFILLS)
        self._since: float | None = None
        self._computed_before = 0

    def got_work(self, now: float) -> None:
        """Record that the engine got work; if it was idle, its next step begins now."""
        if self._since is None:
            self._since = now

    def stepped(self, now: float, *, unfinished: bool, computed_tokens: int) -> None:
        """Record a reported step and the prompt tokens computed in it; ``unfinished``: work is left."""
        if self._since is not None:
            took_s = now - self._since
            # vLLM schedules a step ahead, so its report may name the tokens of the next step.
            tokens = max(computed_tokens, self._computed_before)
            if tokens < LEAST_PREFILL_TOKENS:
                self._decodes_s.append(took_s)
            else:
                self._prefills.append((tokens, took_s))
        self._computed_before = computed_tokens
        self._since = now if unfinished else None

    def limit_s(self, pending_tokens: int) -> float:
        """Longest time without a step, in seconds, if the current step may have that many prompt tokens."""
        has_prefill = pending_tokens >= LEAST_PREFILL_TOKENS
        if len(self._decodes_s) < KNOWN_STEPS or (has_prefill and not self._prefills):
            return self._longest_s
        p99_s = sorted(self._decodes_s)[ceil(0.99 * len(self._decodes_s)) - 1]
        expected_s = max(p99_s, self._prefill_s(pending_tokens) if has_prefill else 0.0)
        return min(self._longest_s, max(LEAST_LIMIT_S, FACTOR * expected_s))

    def _prefill_s(self, tokens: int) -> float:
        longest = max(count for count, _ in self._prefills)
        rates = [took_s / count for count, took_s in self._prefills if count >= LONG_PREFILL * longest]
        return tokens * max(rates)
