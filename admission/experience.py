"""What a backend has been seen to do, and what is expected of it by that."""

from __future__ import annotations

from admission.lengths import OutputLengths
from admission.limit import AdaptiveLimit
from admission.rates import CachedShares, Rates
from admission.ticket import Ticket
from admission.values import Demand, Limits

# An engine that has given no first token for so long is tried, when idle, whatever it was like before.
RELEARN_S = 5.0


class Experience:
    """One backend's rates, lengths of answers, cached shares, and how many sequences it should run.

    Args:
        limits: the backend's thresholds.
    """

    __slots__ = ("_first_token_at", "_limits", "cached_shares", "lengths", "limit", "rates")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._first_token_at = float("-inf")
        self.rates = Rates()
        self.lengths = OutputLengths(limits.output_share)
        self.cached_shares = CachedShares()
        self.limit = AdaptiveLimit(limits.max_in_flight)

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
        return now + first_s + self.rates.error_s.value >= due

    def forgotten(self, now: float, *, busy: bool) -> bool:
        """Whether the last first token is so long ago that what it took is no reason to refuse for.

        Without this, the estimates of a bad minute would send away all who have a deadline, for good.
        """
        return not busy and now - self._first_token_at > RELEARN_S

    def first_token(self, ticket: Ticket, now: float, cached_tokens: int | None) -> None:
        """The first piece of an answer is there."""
        self._first_token_at = now
        self.rates.first_token(ticket.ahead_at_hand_over, now - ticket.handed_on_at)
        really_s = now - ticket.waiting.arrived_at
        self.rates.ttft_error_s.learn(abs(really_s - ticket.estimated_first_token_s))
        if cached_tokens is not None:
            self.cached_shares.learn(ticket.kind, cached_tokens, ticket.demand.input_tokens)

    def succeeded(self, ticket: Ticket, output_tokens: int, in_flight: int, now: float) -> None:
        """An answer is whole; ``in_flight`` sequences ran while it did."""
        self.rates.hold_s.learn(now - ticket.handed_on_at)
        each = output_tokens // ticket.demand.sequences
        self.lengths.learn(ticket.kind, each)
        # Whether its pace met its route's targets; without a target for the pace the limit stays.
        limits, first_at = ticket.demand.limits or self._limits, ticket.first_token_at
        if limits.tpot_slo_s is None or first_at is None or each < 2:
            return
        tpot_s = (now - first_at) / (each - 1)
        self.rates.tpot_s.learn(tpot_s)
        in_slo = tpot_s <= limits.tpot_slo_s
        # A prompt that alone takes longer than the target says nothing about the size of the batch.
        alone_s = self.rates.s_per_token * ticket.uncached
        if limits.ttft_slo_s is not None and alone_s <= limits.ttft_slo_s:
            in_slo = in_slo and first_at - ticket.handed_on_at <= limits.ttft_slo_s
        self.limit.saw(in_slo=in_slo, in_flight=in_flight, now=now)
