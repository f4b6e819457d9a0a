"""The figures of admission: what was decided and why, how long requests waited, how each gate stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from admission.events import Admitted, FirstToken, RefusedEvent
from admission.values import Reason
from observability.histogram import Histogram
from observability.labels import Bounded, Series

# Seconds. The default wait budgets, 2 s and 2.4 s for high priority, lie between steps of their own.
WAIT_BUCKETS = (0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 2.4, 5.0, 10.0, 30.0)
# How far a first token came from where its offer foresaw it; the target for the first token is 0.2 s.
ERROR_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 10.0)
CIRCUITS = ("closed", "half_open", "open")


def class_of(priority: int) -> str:
    """A priority's name in labels."""
    return "high" if priority > 0 else "low" if priority < 0 else "normal"


@dataclass(frozen=True, slots=True)
class GateFigures:
    """How one gate stands when it is scraped.

    Args:
        name: the backend's, or the engine's that several share.
        queued: waiting requests by class.
        waiting_tokens: uncached prompt tokens that wait.
        in_flight: sequences handed on.
        limit: sequences that may be.
        rungs: rungs climbed, by the route that has a ladder of its own; "" for the one of all others.
        factor: share of the sequences and blocks that is used.
        circuit: ``closed``, ``half_open`` or ``open``.
        kv_usage: share of the KV pool in use, as told.
        kv_forecast: the same at the fullest moment to come.
        prefill_backlog: uncached prompt tokens handed on and not yet computed.
        pace: time between two tokens over its target; ``None`` without one, or while too little is known.
    """

    name: str
    queued: Mapping[str, int]
    waiting_tokens: int
    in_flight: int
    limit: int
    rungs: Mapping[str, int]
    factor: float
    circuit: str
    kv_usage: float
    kv_forecast: float
    prefill_backlog: int
    pace: float | None = None


class AdmissionMetrics(Collector):
    """Counts admission's events; reads the gates when scraped.

    Args:
        registry: where the metrics are shown.
        backends: bound of the label ``backend``.
    """

    def __init__(self, registry: CollectorRegistry, backends: Bounded) -> None:
        self._decisions = Series(
            Counter(
                "sluice_admission_decisions_total",
                "Admission's decisions.",
                ("decision", "reason"),
                registry=registry,
            ),
            Bounded(), Bounded(reason.value for reason in Reason),
        )  # fmt: skip
        self._decisions("admitted", None)
        for reason in Reason:
            self._decisions("refused", reason.value)  # shown from the start
        self._left = Series(
            Counter(
                "sluice_admission_left_queue_total",
                "Requests that were taken into the line and then sent away: expired, pushed out.",
                ("backend", "reason"),
                registry=registry,
            ),
            backends, Bounded(),
        )  # fmt: skip
        self._shrunk = Series(
            Counter(
                "sluice_admission_shrunk_total",
                "Requests whose answer a long line has shortened.",
                ("backend",),
                registry=registry,
            ),
            backends,
        )
        self._beyond = Series(
            Counter(
                "sluice_admission_beyond_forecast_total",
                "Requests handed on although the memory forecast passed its watermark, and why.",
                ("backend", "reason"),
                registry=registry,
            ),
            backends, Bounded(),
        )  # fmt: skip
        self._waits = Histogram(
            "sluice_admission_wait_seconds", "Time in the line, of those handed on.", WAIT_BUCKETS, registry,
            label="class", values=Bounded(cap=8),
        )  # fmt: skip
        self._error = Histogram(
            "sluice_admission_ttft_error_seconds",
            "How far first tokens came from where their offer foresaw them.",
            ERROR_BUCKETS,
            registry,
        )
        self._read: Callable[[], Iterable[GateFigures]] = tuple
        registry.register(self)

    def read(self, read: Callable[[], Iterable[GateFigures]]) -> None:
        """Where a scrape finds the gates; must neither block nor raise."""
        self._read = read

    def decision(self, decision: str, reason: str | None = None) -> None:
        """Count one decision."""
        self._decisions(decision, reason).inc()

    def admitted(self, event: Admitted) -> None:
        """Count one handed on."""
        self.decision("admitted")
        self._waits.of(class_of(event.priority)).observe(event.waited_s)
        if event.shrunk:
            self._shrunk(event.backend).inc()
        if event.beyond is not None:
            self._beyond(event.backend, event.beyond).inc()

    def refused(self, event: RefusedEvent) -> None:
        """Count one sent away."""
        self.decision("refused", event.reason.value)
        if event.queued:
            self._left(event.backend, event.reason.value).inc()

    def first_token(self, event: FirstToken) -> None:
        """Compare an estimate with what came of it."""
        self._error.observe(abs(event.took_s - event.estimated_s))

    def collect(self) -> Iterator[Metric]:
        """The gauges of one scrape."""
        gates = list(self._read())
        queued = GaugeMetricFamily(
            "sluice_admission_queue_depth", "Requests that wait, by class.", labels=["backend", "class"]
        )
        circuit = GaugeMetricFamily(
            "sluice_admission_circuit", "1 for the state that holds.", labels=["backend", "state"]
        )
        for gate in gates:
            for name in ("high", "normal", "low"):
                queued.add_metric([gate.name, name], gate.queued.get(name, 0))
            for state in CIRCUITS:
                circuit.add_metric([gate.name, state], gate.circuit == state)
        rung = GaugeMetricFamily(
            "sluice_admission_rung",
            "Rungs that a new request would stand on; of routes with a ladder of their own by route.",
            labels=["backend", "route"],
        )
        for gate in gates:
            for route, climbed in gate.rungs.items():
                rung.add_metric([gate.name, route], climbed)
        yield queued
        yield circuit
        yield rung
        plain: tuple[tuple[str, str, Callable[[GateFigures], float | None]], ...] = (
            (
                "sluice_admission_waiting_tokens",
                "Uncached prompt tokens that wait.",
                lambda gate: gate.waiting_tokens,
            ),
            (
                "sluice_admission_in_flight",
                "Sequences handed on and not ended.",
                lambda gate: gate.in_flight,
            ),
            ("sluice_admission_limit", "Sequences that may be in flight.", lambda gate: gate.limit),
            (
                "sluice_admission_factor",
                "Share of its sequences and blocks that is used; 1: all.",
                lambda gate: gate.factor,
            ),
            ("sluice_admission_kv_usage", "Share of KV blocks in use, as told.", lambda gate: gate.kv_usage),
            (
                "sluice_admission_kv_forecast",
                "The same at the fullest moment to come.",
                lambda gate: gate.kv_forecast,
            ),
            (
                "sluice_admission_prefill_backlog_tokens",
                "Uncached prompt tokens handed on and not yet computed.",
                lambda gate: gate.prefill_backlog,
            ),
            (
                "sluice_admission_pace",
                "Time between two tokens over its target; 1: just met.",
                lambda gate: gate.pace,
            ),
        )
        for name, text, value in plain:
            gauge = GaugeMetricFamily(name, text, labels=["backend"])
            for gate in gates:
                if (found := value(gate)) is not None:
                    gauge.add_metric([gate.name], found)
            yield gauge
