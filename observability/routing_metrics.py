"""The routing in the metrics, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class RoutingCollector(Collector):
    """Whether this process can use the store's last revision (``sluice_routing_revision`` is beside it).

    Args:
        read: the store's last revision as far as it is known here, and whether this process cannot use it;
            must neither block nor raise.
    """

    def __init__(self, read: Callable[[], tuple[int, bool]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        last, behind = self._read()
        yield GaugeMetricFamily(
            "sluice_routing_last_revision", "The state store's last revision.", value=last
        )
        yield GaugeMetricFamily(
            "sluice_routing_behind",
            "1 while this process cannot use the last revision and keeps the one before.",
            value=float(behind),
        )
