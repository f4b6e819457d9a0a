"""Faults made on purpose in the metrics: read from the plan when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class ChaosCollector(Collector):
    """How often each fault was made.

    Args:
        read: the counts by backend and kind; must neither block nor raise.
    """

    def __init__(self, read: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The family of one scrape."""
        counter = CounterMetricFamily(
            "sluice_chaos_faults", "Faults made on purpose.", labels=["backend", "kind"]
        )
        for (backend, kind), count in sorted(self._read().items()):
            counter.add_metric([backend, kind], count)
        yield counter
