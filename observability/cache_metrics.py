"""The figures of the response cache and of the limits on fallback legs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from observability.labels import Bounded, Series
from resilience.leg_limits import LegFigures, LegSkipped
from resilience.response_cache_values import AnswersLost, CacheFigures, LookedUp

NANOUSD = 1e9


class CacheMetrics(Collector):
    """Counts the cache's events and the legs passed over; reads what is kept when scraped.

    Args:
        registry: where the metrics are shown.
        backends: bound of the label ``leg``.
    """

    def __init__(self, registry: CollectorRegistry, backends: Bounded) -> None:
        self._lookups = Series(
            Counter(
                "sluice_response_cache_lookups_total",
                "Looks into the response cache: exact, similar, miss, error.",
                ("kind",),
                registry=registry,
            ),
            Bounded(cap=8),
        )
        self._lost = Series(
            Counter(
                "sluice_response_cache_lost_total",
                "Answers that were not kept.",
                ("reason",),
                registry=registry,
            ),
            Bounded(cap=8),
        )
        self._skipped = Series(
            Counter(
                "sluice_fallback_leg_skipped_total",
                "Fallback legs passed over because they were at their limit: concurrency, spend.",
                ("leg", "reason"),
                registry=registry,
            ),
            backends, Bounded(cap=8),
        )  # fmt: skip
        self._read: Callable[[], CacheFigures | None] = lambda: None
        self._read_legs: Callable[[], Mapping[str, LegFigures]] = dict
        registry.register(self)

    def read(self, read: Callable[[], CacheFigures | None]) -> None:
        """Where a scrape finds what is kept; must neither block nor raise."""
        self._read = read

    def read_legs(self, read: Callable[[], Mapping[str, LegFigures]]) -> None:
        """Where a scrape finds how the bounded legs stand; must neither block nor raise."""
        self._read_legs = read

    def looked_up(self, event: LookedUp) -> None:
        """Count one look."""
        self._lookups(event.kind.value).inc()

    def lost(self, event: AnswersLost) -> None:
        """Count answers that were not kept."""
        self._lost(event.reason).inc(event.count)

    def skipped(self, event: LegSkipped) -> None:
        """Count one leg passed over."""
        self._skipped(event.leg, event.reason).inc()

    def collect(self) -> Iterator[Metric]:
        """The gauges of one scrape."""
        kept = self._read()
        if kept is not None:
            yield GaugeMetricFamily(
                "sluice_response_cache_entries", "Answers kept in this process.", kept.entries
            )
            yield GaugeMetricFamily(
                "sluice_response_cache_bytes", "Bytes that they take, estimated.", kept.bytes
            )
        in_use = GaugeMetricFamily("sluice_fallback_leg_in_use", "Requests in a bounded leg.", labels=["leg"])
        spent = GaugeMetricFamily(
            "sluice_fallback_leg_spend_usd",
            "Spent in a bounded leg within the last minute, and reserved.",
            labels=["leg"],
        )
        for name, leg in self._read_legs().items():
            in_use.add_metric([name], leg.in_use)
            spent.add_metric([name], (leg.spent_nanousd + leg.reserved_nanousd) / NANOUSD)
        yield in_use
        yield spent
