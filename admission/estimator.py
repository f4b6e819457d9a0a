"""What a backend has been seen to do, and what is expected of it by that."""

from __future__ import annotations

from admission.lengths import OutputLengths
from admission.limit import AdaptiveLimit
from admission.pace import Pace
from admission.rates import CachedShares, Rates
from admission.ticket import AdmissionTicket
from admission.values import AdmissionLimits, Demand

# An engine that has given no first token for so long is tried, when idle, whatever it was like before.
RELEARN_S = 5.0


class Estimator:
    """One backend's rates, lengths of answers, pace, cached shares, and how many sequences it should run.

    Args:
        limits: the backend's thresholds.
    """

    __slots__ = ("_alone", "_first_token_at", "_limits", "cached_shares", "lengths", "limit", "pace", "rates")

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._first_token_at = float("-inf")
        # The last first token of an engine that did nothing else: prompt tokens computed, seconds.
        self._alone: tuple[int, float] | None = None
        self.rates = Rates()
        self.lengths = OutputLengths(limits.output_share)
        self.cached_shares = CachedShares()
        self.limit = AdaptiveLimit(limits.max_in_flight)
        self.pace = Pace()

    def uncached(self, demand: Demand) -> int:
        """Prompt tokens that must be computed for it; at least one."""
        cached = demand.cached_tokens
        if cached is None:
            cached = self.cached_shares.expect(demand.kind, demand.input_tokens)
        return max(1, demand.input_tokens - cached)

    def expect(self, demand: Demand, max_tokens: int, *, produced: int = 0) -> int:
        """Tokens its answers will likely have together; lengths are learned of one answer."""
        n = demand.sequences
        if n == 1:
            return self.lengths.expect(demand.kind, max_tokens, produced=produced)
        return n * self.lengths.expect(demand.kind, max(1, max_tokens // n), produced=produced // n)

    def misses(self, due: float | None, first_s: float, now: float, *, busy: bool) -> bool:
        """Whether a first token that is expected in ``first_s`` comes too late."""
        if due is None:
            return False
        if self.forgotten(now, busy=busy):
            return now >= due
        # An idle engine is tried without a margin: nobody else is held up. And a few first tokens that were
        # far off, while something was compiled, must not keep all others out: the margin is never more than
        # the estimate itself.
        margin_s = min(self.rates.error_s.value, first_s) if busy else 0.0
        return now + first_s + margin_s >= due

    def first_token_s(self, tokens_ahead: int, *, busy: bool) -> float:
        """Expected seconds from hand-over to the first token.

        What an idle engine did the last time counts more than what it did on average, work beside included.
        """
        expected_s = self.rates.first_token_s(tokens_ahead)
        if busy or self._alone is None:
            return expected_s
        tokens, took_s = self._alone
        return min(expected_s, took_s + self.rates.s_per_token * max(0, tokens_ahead - tokens))

    def forgotten(self, now: float, *, busy: bool) -> bool:
        """Whether the last first token is so long ago that what it took is no reason to refuse for.

        Without this, the estimates of a bad minute would send away all who have a deadline, for good.
        """
        return not busy and now - self._first_token_at > RELEARN_S

    def first_token(self, ticket: AdmissionTicket, now: float, cached_tokens: int | None) -> None:
        """The first piece of an answer is there."""
        self._first_token_at = now
        computed = ticket.ahead_at_hand_over
        if cached_tokens is not None:  # the engine's own word of how much of the prompt it had to compute
            computed += max(1, ticket.demand.input_tokens - cached_tokens) - ticket.uncached
        took_s = now - ticket.handed_on_at
        self.rates.first_token(computed, took_s)
        if ticket.alone:
            self._alone = (computed, took_s)
        really_s = now - ticket.waiting.arrived_at
        self.rates.ttft_error_s.learn(abs(really_s - ticket.estimated_first_token_s))
        if cached_tokens is not None:
            self.cached_shares.learn(ticket.kind, cached_tokens, ticket.demand.input_tokens)
        demand = ticket.demand
        target_s = (demand.limits or self._limits).tpot_slo_s
        self.pace.begin(ticket.number, demand.produced, now, texts=demand.sequences, target_s=target_s)

    def look(self, now: float) -> None:
        """Keep the limit to what the pace of those in flight allows."""
        if self.pace.look(now) and (allows := self.pace.allows()) is not None:
            self.limit.paced(*allows)

    def succeeded(
        self, ticket: AdmissionTicket, output_tokens: int, in_flight: int, now: float, *, workers: int = 1
    ) -> None:
        """An answer is whole; ``in_flight`` sequences ran while it did, on so many engines."""
        self.rates.hold_s.learn(now - ticket.handed_on_at)
        each = output_tokens // ticket.demand.sequences
        self.lengths.learn(ticket.kind, each)
        in_slo = self._in_slo(ticket, each, now)
        if in_slo is not None:
            self.limit.saw(in_slo=in_slo, in_flight=in_flight, now=now, workers=workers)

    def _in_slo(self, ticket: AdmissionTicket, tokens: int, now: float) -> bool | None:
        """Whether the answer met its route's targets; ``None`` where it says nothing about the batch."""
        limits, first_at = ticket.demand.limits or self._limits, ticket.first_token_at
        if first_at is None:
            return None
        met: list[bool] = []
        if limits.tpot_slo_s is not None and tokens > 1:
            met.append((now - first_at) / (tokens - 1) <= limits.tpot_slo_s)
        # A prompt that alone takes longer than the target says nothing about the size of the batch.
        if limits.ttft_slo_s is not None and self.rates.s_per_token * ticket.uncached <= limits.ttft_slo_s:
            met.append(first_at - ticket.handed_on_at <= limits.ttft_slo_s)
        return all(met) if met else None
