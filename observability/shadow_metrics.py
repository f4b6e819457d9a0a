"""The shadow in the metrics, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

NANOUSD = 1e9


@dataclass(frozen=True, slots=True)
class ShadowShown:
    """How the shadow stands.

    Args:
        results: sampled requests by what became of them, since the start; a closed set.
        waiting: copies in line.
        waiting_bytes: that they take.
        active: copies that are worked on.
        written: pairs kept.
        lost: pairs that the ledger's database did not take in time.
        spent_nanousd: within the last minute, and reserved.
    """

    results: Mapping[str, int]
    waiting: int
    waiting_bytes: int
    active: int
    written: int
    lost: int
    spent_nanousd: int


class ShadowCollector(Collector):
    """Shows the shadow.

    Args:
        read: must neither block nor raise.
    """

    def __init__(self, read: Callable[[], ShadowShown]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        found = self._read()
        results = CounterMetricFamily(
            "sluice_shadow_requests",
            "Requests that the shadow's sample chose, by what became of them.",
            labels=["result"],
        )
        for result, count in found.results.items():
            results.add_metric([result], count)
        yield results
        yield GaugeMetricFamily("sluice_shadow_waiting", "Copies in the shadow's line.", found.waiting)
        yield GaugeMetricFamily("sluice_shadow_waiting_bytes", "Bytes they take.", found.waiting_bytes)
        yield GaugeMetricFamily("sluice_shadow_active", "Copies that are worked on.", found.active)
        pairs = CounterMetricFamily(
            "sluice_shadow_pairs", "Compared pairs: written, lost.", labels=["result"]
        )
        pairs.add_metric(["written"], found.written)
        pairs.add_metric(["lost"], found.lost)
        yield pairs
        yield GaugeMetricFamily(
            "sluice_shadow_spend_usd",
            "Spent on shadows within the last minute, and reserved.",
            found.spent_nanousd / NANOUSD,
        )
