"""The figures of LoRA adapters: found loaded or not, loads and their time, what made room, what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from adapters.events import (
    AdapterAsked,
    AdapterLoaded,
    AdapterLoadFailed,
    AdapterReplacedByBase,
    AdapterUnloaded,
)
from observability.histogram import Histogram
from observability.labels import Bounded, Series

# Seconds. The demo adapters load in some ten milliseconds; a large one on a slow disk takes seconds.
LOAD_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class AdapterFigures:
    """How the adapters stand when they are scraped.

    Args:
        states: versions by state.
        resident: loaded in the engine in process.
        places: most that it holds.
    """

    states: dict[str, int]
    resident: int
    places: int


class AdapterMetrics(Collector):
    """Counts the events of adapters; reads how they stand when scraped.

    Args:
        registry: where the metrics are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._asked = Series(
            Counter(
                "sluice_adapter_requests_total",
                "Requests for an adapter of the engine in process, by whether it was loaded already.",
                ("adapter", "resident"),
                registry=registry,
            ),
            Bounded(),
            Bounded(),
        )
        self._loads = Series(
            Counter(
                "sluice_adapter_loads_total",
                "Loads of adapters: on a request or ahead of it, or failed, by the reason.",
                ("result",),
                registry=registry,
            ),
            Bounded(),
        )
        self._load_s = Histogram(
            "sluice_adapter_load_seconds", "Time to load an adapter into the engine.", LOAD_BUCKETS, registry
        )
        self._unloads = Series(
            Counter(
                "sluice_adapter_unloads_total",
                "Adapters given up: for room, or retired.",
                ("reason",),
                registry=registry,
            ),
            Bounded(),
        )
        self._base = Series(
            Counter(
                "sluice_adapter_replaced_by_base_total",
                "Answers of the base model in place of an adapter that could not be used.",
                ("adapter",),
                registry=registry,
            ),
            Bounded(),
        )
        self._figures: Callable[[], AdapterFigures] | None = None
        registry.register(self)

    def read(self, figures: Callable[[], AdapterFigures]) -> None:
        """Where the gauges come from."""
        self._figures = figures

    def asked(self, event: AdapterAsked) -> None:
        """A request needs one."""
        self._asked(event.adapter_id, "yes" if event.resident else "no").inc()

    def loaded(self, event: AdapterLoaded) -> None:
        """The engine has taken one."""
        self._loads("ahead" if event.ahead else "on_request").inc()
        self._load_s.observe(event.load_s)

    def load_failed(self, event: AdapterLoadFailed) -> None:
        """The engine could not take one."""
        self._loads(event.code).inc()

    def unloaded(self, event: AdapterUnloaded) -> None:
        """The engine has given one up."""
        self._unloads(event.reason).inc()

    def replaced(self, event: AdapterReplacedByBase) -> None:
        """The base model answered."""
        self._base(event.adapter_id).inc()

    def collect(self) -> Iterator[Metric]:
        """The gauges of one scrape."""
        if self._figures is None:
            return
        figures = self._figures()
        states = GaugeMetricFamily("sluice_adapters", "Registered versions of adapters.", labels=["state"])
        for state, count in figures.states.items():
            states.add_metric([state], count)
        yield states
        yield GaugeMetricFamily(
            "sluice_adapters_resident", "Adapters that the engine in process holds.", value=figures.resident
        )
        yield GaugeMetricFamily(
            "sluice_adapter_places", "Most adapters that the engine in process holds.", value=figures.places
        )
