"""Hedged requests in the metrics: read from the pools when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

RESULTS = ("won", "lost", "refused")


class HedgeCollector(Collector):
    """What became of late requests.

    Args:
        read: by backend, the counts of each of :data:`RESULTS`: the second worker was first, it was not,
            or the share of extra requests was used up. Must neither block nor raise.
    """

    def __init__(self, read: Callable[[], Mapping[str, tuple[int, int, int]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The family of one scrape."""
        counter = CounterMetricFamily(
            "sluice_hedged_requests",
            "Requests late with their first token, by what asking a second worker came to.",
            labels=["backend", "result"],
        )
        for backend, counts in self._read().items():
            for result, count in zip(RESULTS, counts, strict=True):
                counter.add_metric([backend, result], count)
        yield counter
