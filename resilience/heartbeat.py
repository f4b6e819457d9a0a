"""The longest time that an engine with work may take for a step, from its own step times. Sans I/O.

The limit is the largest of 2 s, five times the 99th percentile of its decode steps, and five times the
expected time of the prompt tokens that its current step may compute: a long prefill is one step. The
configured limit is the upper bound, and holds until the step times are known. Prompts for adapters have a
speed of their own: on a CPU vLLM needs up to 50 times as long for them.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil, inf

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


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens that a step may compute: of the base model's prompts, and of those for adapters."""

    base: int = 0
    adapters: int = 0

    @classmethod
    def in_a_step(cls, base: int, adapters: int, step_tokens: int) -> "PromptTokens":
        """The part of the pending tokens that a step of at most ``step_tokens`` computes, at its slowest."""
        adapters = min(adapters, step_tokens)
        return cls(min(base, step_tokens - adapters), adapters)


NO_PROMPTS = PromptTokens()


class Heartbeat:
    """The step times of one engine; ``longest_s`` is the configured limit."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._decodes_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._prefills = _Prefills()
        self._adapter_prefills = _Prefills()
        self._since: float | None = None
        self._computed_before = 0
        # Whether an adapter's prompt has come; before that ``stepped`` needs no ``pending``.
        self.has_adapters = False
        # Whether the current step may compute prompts of these kinds.
        self._may_be_base = self._may_be_adapter = False

    def got_work(self, now: float, *, adapter: bool = False) -> None:
        """Record that the engine got work; if it was idle, its next step begins now."""
        if self._since is None:
            self._since = now
        if adapter:
            self.has_adapters = self._may_be_adapter = True
        else:
            self._may_be_base = True

    def stepped(
        self, now: float, *, unfinished: bool, computed_tokens: int, pending: PromptTokens = NO_PROMPTS
    ) -> None:
        """Record a reported step and the prompt tokens computed in it.

        Args:
            unfinished: work is left.
            pending: what the next step may compute.
        """
        if self._since is not None:
            took_s = now - self._since
            # vLLM schedules a step ahead, so its report may name the tokens of the next step.
            tokens = max(computed_tokens, self._computed_before)
            if tokens < LEAST_PREFILL_TOKENS:
                self._decodes_s.append(took_s)
            elif self._may_be_adapter and not self._may_be_base:
                self._adapter_prefills.add(tokens, took_s)
            else:  # a step with prompts of both kinds is slower, so it only raises the limit
                self._prefills.add(tokens, took_s)
        self._may_be_base, self._may_be_adapter = pending.base > 0, pending.adapters > 0
        self._computed_before = computed_tokens
        self._since = now if unfinished else None

    def limit_s(self, pending: PromptTokens) -> float:
        """Longest time without a step, in seconds, if the current step may compute those prompt tokens."""
        if len(self._decodes_s) < KNOWN_STEPS:
            return self._longest_s
        p99_s = sorted(self._decodes_s)[ceil(0.99 * len(self._decodes_s)) - 1]
        prefill_s = self._prefills.expected_s(pending.base) + self._adapter_prefills.expected_s(
            pending.adapters
        )
        return min(self._longest_s, max(LEAST_LIMIT_S, FACTOR * max(p99_s, prefill_s)))


class _Prefills:
    """The times of the last steps with prompts of one kind."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_PREFILLS)

    def add(self, tokens: int, took_s: float) -> None:
        self._steps.append((tokens, took_s))

    def expected_s(self, tokens: int) -> float:
        """The time of so many prompt tokens by the slowest step; infinite as long as none is known."""
        if tokens < LEAST_PREFILL_TOKENS:
            return 0.0
        longest = max((count for count, _ in self._steps), default=0)
        rates = [took_s / count for count, took_s in self._steps if count >= LONG_PREFILL * longest]
        return tokens * max(rates, default=inf)
