"""Remote workers in the metrics: one series a worker, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

LABELS = ["backend", "worker"]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker at one moment.

    Args:
        url: its base URL.
        state: ``new``, ``in_service`` or ``ejected``.
        weight: its share of the load against a worker in full service, 0 to 1; 0 when out of service.
        in_flight: requests sent from here that have not ended.
        connections: open ones, idle ones included.
        ejections: how often it was taken out of service since the start.
        retry_in_s: seconds until an ejected one is tried again.
        running: sequences in its batch, ours since its last word included; ``None`` when it tells nothing.
        waiting: likewise in its queue.
        kv_usage: share of its KV blocks in use, 0 to 1.
    """

    url: str
    state: str
    weight: float
    in_flight: int
    connections: int
    ejections: int
    retry_in_s: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


class WorkerCollector(Collector):
    """The workers of every pool, as the gateway sees them.

    Args:
        read: the workers now, by backend; must neither block nor raise.
    """

    def __init__(self, read: Callable[[], Mapping[str, Sequence[WorkerStatus]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        seen = [(name, one) for name, workers in self._read().items() for one in workers]
        gauges: tuple[tuple[str, str, Callable[[WorkerStatus], float | None]], ...] = (
            ("sluice_worker_in_service", "1 while it is given requests.", _in_service),
            ("sluice_worker_weight", "Its share against a worker in full service.", lambda one: one.weight),
            ("sluice_worker_in_flight", "Requests there from here.", lambda one: one.in_flight),
            ("sluice_worker_connections", "Connections to it.", lambda one: one.connections),
            ("sluice_worker_running", "Sequences in its batch, as believed.", lambda one: one.running),
            ("sluice_worker_waiting", "Sequences in its queue, as believed.", lambda one: one.waiting),
            ("sluice_worker_kv_usage", "Share of its KV blocks, as believed.", lambda one: one.kv_usage),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for backend, one in seen:
                number = value(one)
                if number is not None:
                    gauge.add_metric([backend, one.url], number)
            yield gauge
        counter = CounterMetricFamily(
            "sluice_worker_ejections", "Times it was taken out of service.", labels=LABELS
        )
        for backend, one in seen:
            counter.add_metric([backend, one.url], one.ejections)
        yield counter


def _in_service(one: WorkerStatus) -> float:
    return float(one.state == "in_service")
