"""Rolling figures of the last minute, for readiness and deep health."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import StrEnum

from msgspec import Struct

from admission.values import Reason
from observability.events import RequestRecord
from resilience.failures import POLICIES, FailureKind, HealthEffect

WINDOW_S = 60.0
MAX_SAMPLES = 10_000  # enough for a minute at 170 requests per second; the oldest samples are dropped first
MIN_SAMPLES = 10  # below this many requests a rate is meaningless


# Refusals because of overload. An open circuit breaker means failures instead.
OVERLOAD = frozenset(reason.value for reason in Reason) - {Reason.CIRCUIT_OPEN.value}
# Codes of 5xx answers that are not failures of this gateway: load shedding, the drain, a passed deadline.
NO_FAULT = OVERLOAD | {"draining", "deadline_exceeded"}
# Failures caused by the request itself; a caller must not be able to make a gateway not ready by them.
OF_THE_REQUEST = frozenset(
    kind.value for kind in FailureKind if POLICIES[kind].health is HealthEffect.NOTHING
)
DEGRADED = "degraded"


class HealthOutcome(StrEnum):
    """The outcome of a request for health."""

    SERVED = "served"
    """Answered, or refused because of the caller's own error."""
    FALLBACK = "fallback"
    """A fallback target answered, or the degraded text after a failure that the request caused."""
    SHED = "shed"
    """Refused because of overload, also with the degraded text."""
    FAILED = "failed"
    """Failed: an error, or the degraded text because the backend failed."""


# As constants, as in ``gateway.contracts.values``.
SERVED, FAILED = HealthOutcome.SERVED, HealthOutcome.FAILED


def outcome(record: RequestRecord) -> HealthOutcome:
    """Return the outcome of a finished request.

    A fallback target's answer is no failure: taking the gateway out of service would not give a better one.
    Shedding is no failure: less traffic here would mean more for other gateways. The degraded text instead of
    a failed generation is a failure: another gateway might answer.
    """
    if record.failed:
        return HealthOutcome.SHED if record.error_code in NO_FAULT else HealthOutcome.FAILED
    if record.fallback_kind is None:
        return SERVED
    reason = record.fallback_reason
    if record.finish_reason != DEGRADED or reason in OF_THE_REQUEST:
        return HealthOutcome.FALLBACK
    return HealthOutcome.SHED if reason in OVERLOAD else HealthOutcome.FAILED


class Sample(Struct, frozen=True):
    """One finished request: its end on the monotonic clock in seconds, and its times in milliseconds.

    ``judged``: whether it counts in the error rate. A batch's line does not: it may run again, here or on
    another gateway, and must not take the gateway from its callers.
    ``route`` is ``None`` if the request had none, or was the caller's mistake: that does not show that its
    route works.
    """

    at: float
    outcome: HealthOutcome
    judged: bool
    ttft_ms: float | None
    tpot_ms: float | None
    route: str | None


class RollingStats:
    """Counts the last minute's requests, at most ``MAX_SAMPLES``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun_at = clock()
        self._samples: deque[Sample] = deque()
        self._preemptions: deque[tuple[float, int]] = deque(maxlen=MAX_SAMPLES)
        self._restarted_at = float("-inf")
        # Counts of the samples since the restart, updated with each sample: readiness is read often, and an
        # iteration over 10,000 samples took 1.3 ms of the event loop.
        self._judged = 0
        self._failed = 0

    def observe(self, record: RequestRecord) -> None:
        now = self._clock()
        self._forget(before=now - WINDOW_S, most=MAX_SAMPLES - 1)
        route = None if 400 <= record.status < 500 else record.route
        tpot_ms = record.time_per_output_token_ms
        sample = Sample(now, outcome(record), not record.batch_line, record.ttft_ms, tpot_ms, route)
        self._samples.append(sample)
        self._count(sample, 1)

    def observe_preemptions(self, total: int) -> None:
        """Record the engine's counter of preemptions since its start."""
        if not self._preemptions or self._preemptions[-1][1] != total:
            self._preemptions.append((self._clock(), total))

    def engine_restarted(self) -> None:
        """Reset the error rate: failures before the restart no longer count."""
        self._restarted_at = self._clock()
        self._judged = self._failed = 0
        for sample in self._samples:
            self._count(sample, 1)

    def error_rate(self) -> float:
        """Return the share of the last minute's requests that failed; 0 with fewer than ``MIN_SAMPLES``.

        Lines of batches do not count. Only requests since the engine's last restart count, so that the
        gateway is soon ready again after it.
        """
        self._forget(before=self._clock() - WINDOW_S)
        return self._failed / self._judged if self._judged >= MIN_SAMPLES else 0.0

    def failing(self, limit: float) -> bool:
        """Whether at least this share of the last minute's requests failed, and on each route as well.

        A backend of one route fails for all gateways at once; without them the other routes would fail too.
        """
        if self.error_rate() < limit:
            return False
        judged: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for sample in self._samples:
            if sample.judged and sample.route is not None and sample.at >= self._restarted_at:
                judged[sample.route] += 1
                failed[sample.route] += sample.outcome is FAILED
        return all(failed[route] >= limit * count for route, count in judged.items())

    def figures(self) -> dict[str, object]:
        """Return the figures for deep health: the last minute's counts; mean, P50 and P99 of its times."""
        now = self._clock()
        since = now - WINDOW_S
        self._forget(before=since)
        recent = self._samples
        counts = Counter(sample.outcome for sample in recent)
        # The span is shorter than the window at the start, and if the oldest samples were dropped.
        full = len(recent) == MAX_SAMPLES
        span_s = now - recent[0].at if full else min(WINDOW_S, now - self._begun_at)
        totals = [total for at, total in self._preemptions if at >= since]
        before = [total for at, total in self._preemptions if at < since]
        start = before[-1] if before else 0
        return {
            "requests_last_minute": len(recent),
            "requests_per_second": round(len(recent) / span_s, 3) if span_s > 0 else 0.0,
            "errors_last_minute": counts[HealthOutcome.FAILED],
            "fallbacks_last_minute": counts[HealthOutcome.FALLBACK],
            "shed_last_minute": counts[HealthOutcome.SHED],
            "preemptions_last_minute": max(0, totals[-1] - start) if totals else 0,
            **_times("ttft_ms", [s.ttft_ms for s in recent if s.ttft_ms is not None]),
            **_times("tpot_ms", [s.tpot_ms for s in recent if s.tpot_ms is not None]),
        }

    def _forget(self, *, before: float, most: int = MAX_SAMPLES) -> None:
        samples = self._samples
        while samples and (samples[0].at < before or len(samples) > most):
            self._count(samples.popleft(), -1)

    def _count(self, sample: Sample, one: int) -> None:
        if sample.judged and sample.at >= self._restarted_at:
            self._judged += one
            self._failed += one * (sample.outcome is FAILED)


def _times(name: str, values: Sequence[float]) -> dict[str, object]:
    ordered = sorted(values)
    if not ordered:
        return {f"{name}_{figure}": None for figure in ("avg", "p50", "p99")}
    return {
        f"{name}_avg": round(sum(ordered) / len(ordered), 3),
        **{
            f"{name}_p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 3)
            for p in (50, 99)
        },
    }
