"""Metrics of service levels: the number of requests that met their route's targets, for burn rates.

A route has two objectives (``slo`` in its routing configuration): ``ttft``, the first token in time, which
half of the requests must meet (a P50, 200 ms by default), and ``total``, the whole answer in time, which 99 %
must meet (a P99, 1,400 ms). The recording rules compute the shares; this module only counts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from observability.events import DISCONNECTED, RequestRecord
from observability.histogram import LabelCounter
from observability.labels import Bounded
from observability.scrape import gauge

OBJECTIVES = ("ttft", "total")
DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class SloTargets:
    """A route's targets in milliseconds, from arrival."""

    ttft_ms: float
    total_ms: float


NO_TARGETS: Mapping[str, SloTargets] = MappingProxyType({})


def targets_met(record: RequestRecord, targets: SloTargets) -> tuple[bool | None, bool | None]:
    """Whether a request met each of the two objectives; ``None``: it does not count for the objective.

    - Lines of batches do not count: no caller waits for them, and they start when callers leave capacity.
    - The caller's own errors and exceeded limits (4xx) do not count.
    - The degraded text is no answer: both objectives are missed, however fast it was.
    - An error of the gateway misses both; a broken stream misses ``total``, and its first token counts.
    - After a caller's disconnect, a pending objective counts, as a miss, only if its target had passed.
    """
    if record.batch_line:
        return None, None
    first_ms, total_ms = record.ttft_ms, record.total_ms
    if record.status == DISCONNECTED:
        within = False if total_ms > targets.total_ms else None
        if first_ms is not None:
            return first_ms <= targets.ttft_ms, within
        return (False if total_ms > targets.ttft_ms else None), within
    if 400 <= record.status < 500:
        return None, None
    if record.status >= 500 or record.finish_reason == DEGRADED:
        return False, False
    if first_ms is None:
        first_ms = total_ms  # the answer was sent as a whole, e.g. from the response cache
    return first_ms <= targets.ttft_ms, record.error_code is None and total_ms <= targets.total_ms


class SloMetrics(Collector):
    """Counts requests and those that met their targets."""

    def __init__(self, registry: CollectorRegistry, routes: Bounded) -> None:
        # The current targets by route; must neither block nor raise.
        self.targets: Callable[[], Mapping[str, SloTargets]] = lambda: NO_TARGETS
        registry.register(self)
        self._counted = LabelCounter(
            "sluice_slo_requests", "Requests that count for a service level.",
            "route", "objective", OBJECTIVES, routes, registry,
        )  # fmt: skip
        self._good = LabelCounter(
            "sluice_slo_good", "Requests that met their route's target.",
            "route", "objective", OBJECTIVES, routes, registry,
        )  # fmt: skip

    def count(self, records: Iterable[RequestRecord], targets: Mapping[str, SloTargets]) -> None:
        """Count finished requests of routes that have targets."""
        rows: dict[str, tuple[list[int], list[int]]] = {}
        for record in records:
            route = record.route or ""
            of_route = targets.get(route)
            if of_route is None:
                continue
            if route not in rows:
                rows[route] = self._counted.of(route), self._good.of(route)
            counted, good = rows[route]
            for index, verdict in enumerate(targets_met(record, of_route)):
                if verdict is not None:
                    counted[index] += 1
                    good[index] += verdict

    def collect(self) -> Iterator[Metric]:
        """The targets of one scrape; also shows the counts of every route with targets, from 0 on."""
        seconds = {}
        for route, targets in self.targets().items():
            self._counted.of(route)
            self._good.of(route)
            seconds[route, "ttft"] = targets.ttft_ms / 1000
            seconds[route, "total"] = targets.total_ms / 1000
        yield gauge(
            "sluice_slo_target_seconds", "The routes' targets in force.", seconds, "route", "objective"
        )
