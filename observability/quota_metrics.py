"""Keys' limits in the metrics: by outcome and kind, never by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from accounting.quota_events import (
    LimitStoreAnswered,
    LimitStoreMissed,
    QuotaDecided,
    QuotaEvent,
    QuotaSettled,
    SettlementsLost,
)
from observability.histogram import Histogram

# Seconds; a store on the same network answers within the first two, and is given up behind the last.
ANSWER_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
OUTCOMES = ("allowed", "requests_per_minute", "tokens_per_minute", "tokens_per_day")
REASONS = ("timeout", "unavailable")


class QuotaMetrics(Collector):
    """Counts what the limiter tells; reads how it stands with the store when scraped.

    Args:
        registry: where the metrics are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter(
            "sluice_quota_decisions_total",
            "Questions of limited keys, by what was asked for and which limit refused; counts=own: decided "
            "by this process alone.",
            ("kind", "outcome", "counts"),
            registry=registry,
        )
        for kind, outcomes in (("request", OUTCOMES[:2]), ("tokens", (OUTCOMES[0], *OUTCOMES[2:]))):
            for outcome in outcomes:
                for counts in ("shared", "own"):
                    self._decisions.labels(kind, outcome, counts)
        self._tokens = Counter(
            "sluice_quota_tokens_total",
            "Tokens of limited keys' requests that have ended: held for them, and used by them.",
            ("kind",),
            registry=registry,
        )
        self._held, self._used = self._tokens.labels("held"), self._tokens.labels("used")
        self._missed = Counter(
            "sluice_quota_store_misses_total",
            "Times that the shared limits did not answer; this process' own counts decide then.",
            ("reason",),
            registry=registry,
        )
        for reason in REASONS:
            self._missed.labels(reason)
        self._lost = Counter(
            "sluice_quota_settlements_lost_total",
            "Requests whose use the shared limits will never hear of.",
            registry=registry,
        )
        self._answers = Histogram(
            "sluice_quota_store_seconds", "Time of the shared limits' answers.", ANSWER_BUCKETS, registry
        )
        self._read: Callable[[], tuple[bool, int]] | None = None
        registry.register(self)

    def read(self, read: Callable[[], tuple[bool, int]]) -> None:
        """Where a scrape finds whether the store is away, and the settlements that wait; must not block."""
        self._read = read

    def emit(self, event: QuotaEvent) -> None:
        """Record one event; raises nothing."""
        match event:
            case QuotaDecided(kind, refused_by, shared):
                self._decisions.labels(kind, refused_by or "allowed", "shared" if shared else "own").inc()
            case QuotaSettled(held, used):
                self._held.inc(held)
                self._used.inc(used)
            case LimitStoreAnswered(took_s):
                self._answers.observe(took_s)
            case LimitStoreMissed(reason):
                self._missed.labels(reason).inc()
            case SettlementsLost(count):
                self._lost.inc(count)

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape; none where limits are not shared."""
        if self._read is None:
            return
        away, waiting = self._read()
        yield GaugeMetricFamily(
            "sluice_quota_store_up", "1 while the shared limits answer.", value=float(not away)
        )
        yield GaugeMetricFamily(
            "sluice_quota_settlements_waiting",
            "Ended requests that the shared limits have not heard of.",
            value=float(waiting),
        )
