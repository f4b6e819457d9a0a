"""The service levels: how many requests of a route met its targets, for burn rates.

Two objectives a route (``slo`` in its routing configuration): ``ttft``, the first token in time, which half
of the requests must meet (a P50), and ``total``, the whole answer in time, which 99 % must (a P99). The
default targets are 200 ms and 1,400 ms. The shares are in the recording rules; here the requests that met
their target are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from observability.events import RequestRecord
from observability.labels import Bounded
from observability.tally import LabelCounter

OBJECTIVES = ("ttft", "total")
# What `RequestRecord.status` is when the caller left before the end.
LEFT = 499
DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class SloTargets:
    """A route's targets in milliseconds, from arrival."""

    ttft_ms: float
    total_ms: float


NO_TARGETS: Mapping[str, SloTargets] = MappingProxyType({})


def met(record: RequestRecord, targets: SloTargets) -> tuple[bool | None, bool | None]:
    """Whether a request met the two objectives; ``None``: it says nothing of one.

    - The caller's own fault, and limits (4xx), say nothing.
    - The degraded text is no answer: both are missed, however fast it was.
    - What the house failed misses both; of a stream that broke off the first token counts as it came.
    - A caller who left says something only when the target had passed by then.
    """
    first_ms, total_ms = record.ttft_ms, record.total_ms
    if record.status == LEFT:
        patient = False if total_ms > targets.total_ms else None
        if first_ms is not None:
            return first_ms <= targets.ttft_ms, patient
        return (False if total_ms > targets.ttft_ms else None), patient
    if 400 <= record.status < 500:
        return None, None
    if record.status >= 500 or record.finish_reason == DEGRADED:
        return False, False
    if first_ms is None:
        first_ms = total_ms  # an answer that came whole, as the response cache's do
    return first_ms <= targets.ttft_ms, record.error_code is None and total_ms <= targets.total_ms


class SloMetrics(Collector):
    """Counts who met the targets.

    Args:
        registry: where the metrics are shown.
        routes: bound of the label ``route``.
    """

    def __init__(self, registry: CollectorRegistry, routes: Bounded) -> None:
        self._read: Callable[[], Mapping[str, SloTargets]] = lambda: NO_TARGETS
        registry.register(self)
        self._asked = LabelCounter(
            "sluice_slo_requests", "Requests that a service level speaks of.",
            "route", "objective", OBJECTIVES, routes, registry,
        )  # fmt: skip
        self._good = LabelCounter(
            "sluice_slo_good", "Those of them that met their route's target.",
            "route", "objective", OBJECTIVES, routes, registry,
        )  # fmt: skip

    def read(self, read: Callable[[], Mapping[str, SloTargets]]) -> None:
        """Where the targets in force are found, by route; must neither block nor raise."""
        self._read = read

    def request(self, record: RequestRecord) -> None:
        """Count one finished request of a route that has targets."""
        targets = None if record.route is None else self._read().get(record.route)
        if targets is None:
            return
        asked, good = self._asked.of(record.route), self._good.of(record.route)
        for index, verdict in enumerate(met(record, targets)):
            if verdict is not None:
                asked[index] += 1
                good[index] += verdict

    def collect(self) -> Iterator[Metric]:
        """The targets of one scrape; a route's counts are there from its first scrape on."""
        family = GaugeMetricFamily(
            "sluice_slo_target_seconds", "The targets in force.", labels=["route", "objective"]
        )
        for route, targets in self._read().items():
            self._asked.of(route)
            self._good.of(route)
            family.add_metric([route, "ttft"], targets.ttft_ms / 1000)
            family.add_metric([route, "total"], targets.total_ms / 1000)
        yield family
