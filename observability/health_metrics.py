"""Readiness in the metrics, read when scraped: a dead engine shows here, whoever answers meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class HealthCollector(Collector):
    """What ``/ready`` would say, and how long it took to be true.

    Args:
        read: whether it is ready, and each check; must neither block nor raise. The checks are the code's
            own, so few.
        after_s: seconds from the process' start until it was first ready; ``None`` while it was not.
    """

    def __init__(
        self, read: Callable[[], tuple[bool, Mapping[str, bool]]], after_s: Callable[[], float | None]
    ) -> None:
        self._read = read
        self._after_s = after_s

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        ready, checks = self._read()
        yield GaugeMetricFamily("sluice_ready", "1 while /ready answers 200.", value=float(ready))
        each = GaugeMetricFamily("sluice_ready_check", "1 while a check of /ready holds.", labels=["check"])
        for name, holds in checks.items():
            each.add_metric([name], float(holds))
        yield each
        after = GaugeMetricFamily(
            "sluice_ready_after_seconds", "From the process' start until it was first ready."
        )
        if (after_s := self._after_s()) is not None:
            after.add_metric([], after_s)
        yield after
