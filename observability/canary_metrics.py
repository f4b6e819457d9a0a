"""The canary in the metrics, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class CanaryFigures:
    """How the last canary stands.

    Args:
        percent: that it should have of the route now.
        requests: on the canary since its start, as far as they were judged.
        evidence: by check, the logarithm of the step's e-value.
        bound: the logarithm at which it is rolled back.
    """

    route: str
    backend: str
    phase: str
    percent: float
    requests: int
    evidence: Mapping[str, float]
    bound: float


class CanaryCollector(Collector):
    """Shows the last canary; nothing while there was none.

    Args:
        read: must neither block nor raise.
    """

    def __init__(self, read: Callable[[], CanaryFigures | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        found = self._read()
        if found is None:
            return
        percent = GaugeMetricFamily(
            "sluice_canary_percent",
            "The last canary's share of its route.",
            labels=["route", "backend", "phase"],
        )
        percent.add_metric([found.route, found.backend, found.phase], found.percent)
        yield percent
        yield GaugeMetricFamily(
            "sluice_canary_requests", "Requests on the last canary that were judged.", value=found.requests
        )
        evidence = GaugeMetricFamily(
            "sluice_canary_evidence_ratio",
            "What a check has against the canary in this step, over what rolls it back; 1: rolled back.",
            labels=["check"],
        )
        for check, log in found.evidence.items():
            evidence.add_metric([check], log / found.bound)
        yield evidence
