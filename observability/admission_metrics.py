"""Metrics of admission: decisions and waits, counted by event, and the gates' figures, read when scraped."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from admission.events import Admitted, FirstToken, RefusedEvent
from admission.values import Reason
from observability.histogram import Histogram
from observability.labels import Bounded, counted
from observability.scrape import gauge

# Seconds. A wait budget of 2 s, and of 2.4 s for high priority (the default factor), has a step of its own.
WAIT_BUCKETS = (0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 2.4, 5.0, 10.0, 30.0)
# Seconds between a first token and its estimate; the target for the first token is 0.2 s.
ERROR_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 10.0)
CLASSES = ("high", "normal", "low")
CIRCUITS = ("closed", "half_open", "open")


def class_of(priority: int) -> str:
    return "high" if priority > 0 else "low" if priority < 0 else "normal"


@dataclass(frozen=True, slots=True)
class GateFigures:
    """One gate at one moment; ``name`` is that of the backend, or of the engine that several backends share.

    ``queued`` is by class, ``rungs`` by route with a ladder of its own ("" for all other routes). ``factor``
    is the share of sequences and blocks that may be used, ``kv_forecast`` the KV usage at the forecast's
    peak, ``prefill_backlog`` the uncached prompt tokens handed on and not yet computed, ``pace`` the time
    between two tokens divided by its target (``None``: no target, or not known).
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


# Name, help and field.
GATE_GAUGES = (
    ("sluice_admission_waiting_tokens", "Uncached prompt tokens of queued requests.", "waiting_tokens"),
    ("sluice_admission_in_flight", "Sequences dispatched and not ended.", "in_flight"),
    ("sluice_admission_limit", "Sequences that may be in flight.", "limit"),
    ("sluice_admission_factor", "Share of sequences and blocks used; 1: all.", "factor"),
    ("sluice_admission_kv_usage", "Share of KV blocks in use, as reported.", "kv_usage"),
    ("sluice_admission_kv_forecast", "Largest forecast share of KV blocks.", "kv_forecast"),
    ("sluice_admission_prefill_backlog_tokens", "Uncached prompt tokens dispatched and not yet computed.",
     "prefill_backlog"),
    ("sluice_admission_pace", "Time between two tokens divided by its target.", "pace"),
)  # fmt: skip


def gate_families(figures: Iterable[GateFigures]) -> Iterator[Metric]:
    gates = list(figures)
    yield gauge(
        "sluice_admission_queue_depth",
        "Queued requests, by class.",
        {(gate.name, name): gate.queued.get(name, 0) for gate in gates for name in CLASSES},
        "backend", "class",
    )  # fmt: skip
    yield gauge(
        "sluice_admission_circuit",
        "1 for the circuit breaker's current state.",
        {(gate.name, state): gate.circuit == state for gate in gates for state in CIRCUITS},
        "backend", "state",
    )  # fmt: skip
    yield gauge(
        "sluice_admission_rung",
        "Overload level for a new request; by route for routes with overload levels of their own.",
        {(gate.name, route): rungs for gate in gates for route, rungs in gate.rungs.items()},
        "backend", "route",
    )  # fmt: skip
    for name, text, field in GATE_GAUGES:
        yield gauge(name, text, {gate.name: getattr(gate, field) for gate in gates}, "backend")


class AdmissionMetrics:
    """Counts admission's events.

    Two of them occur with every request: ``admitted`` and ``first_tokens`` are counted together, with
    finished requests (:mod:`observability.metrics`).
    """

    def __init__(self, registry: CollectorRegistry, backends: Bounded) -> None:
        self.admitted: list[Admitted] = []
        self.first_tokens: list[FirstToken] = []
        counter = partial(counted, registry)
        self._decisions = counter(
            "sluice_admission_decisions_total",
            "Decisions of admission.",
            decision=Bounded(),
            reason=Bounded(),
            **{"class": Bounded(cap=8)},
        )
        for name in CLASSES:  # shown from the start, so that a rate sees the first requests too
            self._decisions("admitted", None, name)
            for reason in Reason:
                self._decisions("refused", reason.value, name)
        self._left = counter(
            "sluice_admission_left_queue_total",
            "Requests that were queued and then refused, by reason.",
            backend=backends, reason=Bounded(),
        )  # fmt: skip
        self._shrunk = counter(
            "sluice_admission_shrunk_total",
            "Requests whose answer was shortened by a long queue.",
            backend=backends,
        )
        self._beyond = counter(
            "sluice_admission_beyond_forecast_total",
            "Requests dispatched although the memory forecast exceeded its watermark, by reason.",
            backend=backends, reason=Bounded(),
        )  # fmt: skip
        self._waits = Histogram(
            "sluice_admission_wait_seconds", "Queue time of dispatched requests.", WAIT_BUCKETS, registry,
            label="class", values=Bounded(cap=8),
        )  # fmt: skip
        for name in CLASSES:
            self._waits.of(name)  # as above
        self._error = Histogram(
            "sluice_admission_ttft_error_seconds",
            "Difference between the first token's time and its forecast.",
            ERROR_BUCKETS,
            registry,
        )

    def count_admitted(self, events: Sequence[Admitted]) -> None:
        waits_s: dict[int, list[float]] = {}
        for event in events:
            waits_s.setdefault(event.priority, []).append(event.waited_s)
            if event.shrunk:
                self._shrunk(event.backend).inc()
            if event.beyond is not None:
                self._beyond(event.backend, event.beyond).inc()
        for priority, waited_s in waits_s.items():
            self._decisions("admitted", None, class_of(priority)).inc(len(waited_s))
            self._waits.of(class_of(priority)).observe(*waited_s)

    def refused(self, event: RefusedEvent) -> None:
        self._decisions("refused", event.reason.value, class_of(event.priority)).inc()
        if event.queued:
            self._left(event.backend, event.reason.value).inc()

    def count_first_tokens(self, events: Sequence[FirstToken]) -> None:
        """Count the distances between the estimates and the measured times."""
        self._error.observe(*[abs(event.took_s - event.estimated_s) for event in events])
