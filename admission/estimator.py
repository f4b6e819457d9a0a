"""Expectations of one backend, learned from its past answers."""

from admission.lengths import OutputLengths
from admission.limit import AdaptiveLimit
from admission.pace import Pace
from admission.rates import CachedShares, Rates
from admission.ticket import AdmissionTicket
from admission.values import AdmissionLimits, Demand

# Without ``max_wait_s`` a first token is due within PATIENCE_S of the arrival (12 times what an idle A10G
# takes for the median prompt of Azure's trace), on a slow engine within PATIENCE_TIMES its time when idle.
PATIENCE_S, PATIENCE_TIMES = 5.0, 3.0
# Before an engine has given this many first tokens, no request without a deadline is refused because of its
# speed: it may still compile or load, and a forecast from a few tokens is wrong by several times.
LEARNED_FROM = 8
COLD_WAIT_S = 60.0  # the longest wait in the queue until then
# A target time per token that the engine misses even with a single answer in flight is replaced by the time
# that this answer takes per token, times PACE_TIMES.
PACE_TIMES = 2.0
# An idle engine without a first token for this long is tried again, whatever its estimates say.
RELEARN_S = 5.0


class Estimator:
    """One backend's rates, lengths of answers, pace, cached shares, and the sequences that it should run."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._first_token_at = float("-inf")
        # The last first token of an engine that was otherwise idle: (prompt tokens computed, seconds).
        self._alone: tuple[int, float] | None = None
        self.rates = Rates()
        self.lengths = OutputLengths(limits.output_share)
        self.cached_shares = CachedShares()
        self.limit = AdaptiveLimit(limits.max_in_flight)
        self.pace = Pace()

    def uncached(self, demand: Demand) -> int:
        """Prompt tokens of the request that the engine must compute; at least one."""
        cached = demand.cached_tokens
        if cached is None:
            cached = self.cached_shares.expect(demand.kind, demand.input_tokens)
        return uncached if (uncached := demand.input_tokens - cached) > 1 else 1

    def expect(self, demand: Demand, max_tokens: int, *, produced: int = 0) -> int:
        """Expected tokens of all answers of the request together; lengths are learned from single answers."""
        n = demand.sequences
        if max_tokens <= n:
            return n
        each = self.lengths.expect(
            demand.kind, max_tokens // n, produced=produced // n, open_ended=demand.open_ended
        )
        return n * each

    def longest_wait(
        self, demand: Demand, limits: AdmissionLimits, alone_s: float
    ) -> tuple[float, float | None]:
        """Seconds that the request may be queued, and when its first token is due; ``None``: at no time."""
        wait_s, within_s = limits.max_wait_s, limits.first_token_within_s
        if wait_s is None:
            wait_s = COLD_WAIT_S
            if self.rates.first_tokens >= LEARNED_FROM:
                wait_s = max(PATIENCE_S, PATIENCE_TIMES * alone_s)
                within_s = wait_s if within_s is None else within_s
        if within_s is None:
            return wait_s, demand.deadline
        by = demand.arrived_at + demand.checked_s + within_s
        return wait_s, by if demand.deadline is None else min(by, demand.deadline)

    def tpot_target_s(self, limits: AdmissionLimits) -> float | None:
        target_s, alone_s = limits.tpot_slo_s, self.pace.alone_s
        return target_s if target_s is None or alone_s <= target_s else PACE_TIMES * alone_s

    def misses(self, due: float, first_s: float, now: float, *, busy: bool) -> bool:
        """Whether a first token that is expected in ``first_s`` comes too late."""
        if self.forgotten(now, busy=busy):
            return now >= due
        # An idle engine is tried without a margin: no other request is delayed. The margin is at most the
        # estimate itself, so that a few late first tokens, as during a compilation, do not block all others.
        margin_s = min(self.rates.error_s.value, first_s) if busy else 0.0
        return now + first_s + margin_s >= due

    def first_token_s(self, tokens_ahead: int, busy_since: float | None = None) -> float:
        """Expected seconds from hand-over to first token; on an idle engine capped by its last idle time.

        ``busy_since`` is when the oldest request in flight was handed on. If no first token came since then,
        a burst began on an idle engine, and the slow first tokens of an outage before it say nothing.
        """
        rates = self.rates
        expected_s = rates.step_s + rates.s_per_token * tokens_ahead
        busy = busy_since is not None and busy_since <= self._first_token_at
        if busy or self._alone is None:
            return expected_s
        tokens, took_s = self._alone
        if tokens_ahead > tokens:
            took_s += rates.s_per_token * (tokens_ahead - tokens)
        return took_s if took_s < expected_s else expected_s

    def forgotten(self, now: float, *, busy: bool) -> bool:
        """Whether the last first token is too old to refuse a request because of it.

        Without this, the estimates of one bad minute would refuse every request with a deadline, for ever.
        """
        return not busy and now - self._first_token_at > RELEARN_S

    def first_token(self, ticket: AdmissionTicket, now: float, cached_tokens: int | None) -> None:
        self._first_token_at = now
        computed = ticket.ahead_at_hand_over
        if cached_tokens is not None:  # as the engine reported it
            computed += max(1, ticket.demand.input_tokens - cached_tokens) - ticket.uncached
        took_s = now - ticket.handed_on_at
        self.rates.first_token(computed, took_s)
        if ticket.alone:
            self._alone = (computed, took_s)
        really_s = now - ticket.arrived_at
        self.rates.ttft_error_s.learn(abs(really_s - ticket.estimated_first_token_s))
        if cached_tokens is not None:
            ticket.cached_tokens = cached_tokens
            self.cached_shares.learn(ticket.demand.kind, cached_tokens, ticket.demand.input_tokens)
        demand = ticket.demand
        if demand.generates:
            target_s = self.tpot_target_s(demand.limits or self._limits)
            self.pace.begin(ticket.number, demand.produced, now, texts=demand.sequences, target_s=target_s)

    def paced(self) -> None:
        """Lower the limit to what the changed pace allows."""
        if (allows := self.pace.allows()) is not None:
            self.limit.paced(*allows)

    def succeeded(
        self, ticket: AdmissionTicket, output_tokens: int, in_flight: int, now: float, *, workers: int = 1
    ) -> None:
        """Learn from a complete answer; ``in_flight`` sequences ran at its end on ``workers`` engines."""
        self.rates.hold_s.learn(now - ticket.handed_on_at)
        demand, first_at = ticket.demand, ticket.first_token_at
        each = output_tokens // demand.sequences
        if ticket.cached_at_end is not None:
            self.cached_shares.learn(demand.kind, ticket.cached_at_end, demand.input_tokens)
        if demand.generates:
            self.lengths.learn(demand.kind, each)
        if first_at is None:
            return
        limits = demand.limits or self._limits
        met: list[bool] = []  # the route's targets that apply to the answer
        if each > 1 and (target_s := self.tpot_target_s(limits)) is not None:
            met.append((now - first_at) / (each - 1) <= target_s)
        # A prompt whose prefill alone takes longer than the target does not depend on the size of the batch.
        if limits.ttft_slo_s is not None and self.rates.s_per_token * ticket.uncached <= limits.ttft_slo_s:
            met.append(first_at - ticket.handed_on_at <= limits.ttft_slo_s)
        if met:
            self.limit.record(in_slo=all(met), in_flight=in_flight, now=now, workers=workers)
