"""The figures of the engine's supervision: how it stands, how often, why and how long it was restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from observability.histogram import Histogram
from observability.labels import Bounded, Series
from resilience.supervisor import Loss, SupervisorState
from resilience.supervisor_events import EngineRestarted, EngineRestarting

# Seconds from the loss to the next answer: the embedded engine's seconds, vLLM's half minute, a large model's
# minutes.
RESTART_BUCKETS = (0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0)


class SupervisorMetrics(Collector):
    """Counts the supervision's events; reads the standing when scraped.

    Args:
        registry: where the metrics are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._restarts = Series(
            Counter(
                "sluice_engine_restarts_total",
                "Restarts of the engine in process, by why it was lost.",
                ("reason",),
                registry=registry,
            ),
            Bounded(known=[reason.value for reason in Loss]),
        )
        self._away = Histogram(
            "sluice_engine_restart_seconds",
            "From the engine's loss until it took work again.",
            RESTART_BUCKETS,
            registry,
        )
        self._read: Callable[[], SupervisorState] | None = None
        registry.register(self)

    def read(self, read: Callable[[], SupervisorState]) -> None:
        """Where a scrape finds the engine's standing; must neither block nor raise."""
        self._read = read
        for reason in Loss:
            self._restarts(reason.value)  # shown from the start, so that `increase()` sees the first

    def restarting(self, event: EngineRestarting) -> None:
        """Count one restart."""
        self._restarts(event.reason.value).inc()

    def restarted(self, event: EngineRestarted) -> None:
        """Keep how long it was away."""
        self._away.observe(event.away_s)

    def collect(self) -> Iterator[Metric]:
        """The gauge of one scrape; none without an engine in process."""
        if self._read is None:
            return
        standing = self._read()
        gauge = GaugeMetricFamily(
            "sluice_engine_state", "1 for the state of the engine in process that holds.", labels=["state"]
        )
        for state in SupervisorState:
            gauge.add_metric([state.value], state is standing)
        yield gauge
