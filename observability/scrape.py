"""Metric families that a scrape builds from figures of other parts."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

T = TypeVar("T")
F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily)

# A number for a metric without labels, else numbers by the value of its label, or by the tuple of its labels'
# values. ``None``: unknown, so the series is left out.
Values = float | None | Mapping[Any, Any]


class ScrapeCollector(Collector, Generic[T]):
    """Builds families from the result of ``read`` at each scrape; ``read`` must neither block nor raise."""

    def __init__(self, families: Callable[[T], Iterator[Metric]], read: Callable[[], T]) -> None:
        self._families = families
        self._read = read

    def collect(self) -> Iterator[Metric]:
        return self._families(self._read())


def gauge(name: str, text: str, values: Values, *labels: str) -> GaugeMetricFamily:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def counter(name: str, text: str, values: Values, *labels: str) -> CounterMetricFamily:
    """A counter family with its samples; ``name`` without ``_total``."""
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(family: F, values: Values) -> F:
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        if value is not None:
            family.add_metric([key] if isinstance(key, str) else key, value)
    return family
