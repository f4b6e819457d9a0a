"""Admission for operators: each gate's state, the limits in force, the last decisions."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from typing_extensions import TypedDict

from admission.controller import AdmissionController
from admission.events import AdmissionEvent, Admitted, RefusedEvent
from admission.gate import BackendGate
from admission.ladder import Rung
from admission.values import AdmissionLimits
from gateway.contracts.times import iso_time
from gateway.routing.revision import Revision
from observability.admission_metrics import GateFigures, class_of

# The number of stored decisions. Refusals are stored separately, so that admissions do not displace them.
KEPT_ADMITTED = 50
KEPT_REFUSED = 100


class AdmissionBody(TypedDict):
    """Each backend's gate, the limits, and the last decisions, newest first."""

    backends: dict[str, dict[str, Any]]
    limits: dict[str, Any]
    decisions: list[dict[str, Any]]


@dataclass(eq=False)
class AdmissionAdmin:
    """Stores the last decisions, and reads the gates on demand."""

    limits: AdmissionLimits
    controller: AdmissionController
    _: KW_ONLY
    revision: Callable[[], Revision]
    clock: Callable[[], float]
    unix_time: Callable[[], float]

    def __post_init__(self) -> None:
        self._admitted: deque[tuple[float, Admitted]] = deque(maxlen=KEPT_ADMITTED)
        self._refused: deque[tuple[float, RefusedEvent]] = deque(maxlen=KEPT_REFUSED)

    def observe(self, event: AdmissionEvent) -> None:
        if isinstance(event, Admitted):
            self._admitted.append((self.unix_time(), event))
        elif isinstance(event, RefusedEvent):
            self._refused.append((self.unix_time(), event))

    def figures(self) -> Iterable[GateFigures]:
        now, ladders = self.clock(), self._ladders()
        return [
            _figures(name, gate, ladders.get(name, {}), now) for name, gate in self.controller.gates.items()
        ]

    def _ladders(self) -> Mapping[str, Mapping[str, tuple[Rung, ...]]]:
        """Return the routes' own degradation ladders, by gate and route."""
        found: dict[str, dict[str, tuple[Rung, ...]]] = {}
        for route in self.revision().routes.values():
            if route.limits is None or route.limits.rungs == self.limits.rungs:
                continue
            for backend in (*(name for name, _ in route.weights), *route.fallback):
                found.setdefault(self.controller.gate_name(backend), {})[route.name] = route.limits.rungs
        return found

    def show(self) -> AdmissionBody:
        """Return gates, limits and decisions; they contain no prompts."""
        now, ladders = self.clock(), self._ladders()
        routes = {
            name: _limits(route.limits, self.limits)
            for name, route in self.revision().routes.items()
            if route.limits is not None
        }
        kept: list[tuple[float, Admitted | RefusedEvent]] = [*self._admitted, *self._refused]
        kept.sort(key=lambda entry: entry[0], reverse=True)
        return {
            "backends": {
                name: _shown(gate, ladders.get(name, {}), now)
                for name, gate in sorted(self.controller.gates.items())
            },
            "limits": {"default": _limits(self.limits), "routes": {k: v for k, v in routes.items() if v}},
            "decisions": [_decision(at, event) for at, event in kept],
        }


def _classes(gate: BackendGate) -> dict[str, int]:
    classes = {"high": 0, "normal": 0, "low": 0}
    for (rank, _), count in gate.queue.counts().items():
        classes[class_of(rank)] += count
    return classes


def _figures(
    name: str, gate: BackendGate, ladders: Mapping[str, tuple[Rung, ...]], now: float
) -> GateFigures:
    used, peak = gate.work.memory.usage(now)
    return GateFigures(
        name=name,
        queued=_classes(gate),
        waiting_tokens=gate.queue.tokens,
        in_flight=gate.work.sequences,
        limit=gate.work.capacity(now),
        rungs={"": gate.rung()[0], **{route: gate.rung(rungs)[0] for route, rungs in ladders.items()}},
        factor=gate.work.scale,
        circuit=gate.circuit.state(now).value,
        kv_usage=used,
        kv_forecast=peak,
        prefill_backlog=gate.work.prefill.total,
        pace=gate.pace.share,
    )


def _rung(gate: BackendGate, rungs: tuple[Rung, ...] | None = None) -> dict[str, Any]:
    climbed, rung = gate.rung(rungs)
    shown = asdict(rung)
    del shown["depth"]
    return {"rung": climbed, **shown}


def _shown(gate: BackendGate, ladders: Mapping[str, tuple[Rung, ...]], now: float) -> dict[str, Any]:
    used, peak = gate.work.memory.usage(now)
    load, rates = gate.work.signals.load, gate.rates
    tenants = sorted(gate.queue.counts().items(), key=lambda entry: (-entry[0][0], -entry[1], entry[0][1]))
    return {
        "queue": {
            "requests": gate.queued,
            "tokens": gate.queue.tokens,
            "bytes": gate.queue.size_bytes,
            "held_by": gate.hold.value if gate.hold else None,
            "classes": _classes(gate),
            "tenants": [
                {"tenant": tenant, "class": class_of(rank), "requests": count}
                for (rank, tenant), count in tenants
            ],
        },
        "in_flight": {
            "requests": gate.in_flight,
            "sequences": gate.work.sequences,
            "limit": gate.work.capacity(now),
            "adaptive_limit": gate.limit.value,
            "engine_limit": (load.max_running or None) if load is not None else None,
            "pace_of_target": None if gate.pace.share is None else round(gate.pace.share, 3),
            "factor": gate.work.scale,
            "prefill_tokens": gate.work.prefill.total,
        },
        "memory": {"used": round(used, 4), "forecast": round(peak, 4)},
        "ladder": {
            **_rung(gate),
            "routes": {route: _rung(gate, rungs) for route, rungs in sorted(ladders.items())},
        },
        "circuit": {
            "state": gate.circuit.state(now).value,
            "error_rate": round(gate.circuit.error_rate(now), 4),
            "retry_after_ms": _ms(gate.circuit.retry_after_s(now)),
        },
        "rates": {
            "prefill_tokens_per_s": round(1 / rates.s_per_token, 1) if rates.s_per_token else None,
            "step_ms": _ms(rates.step_s),
            "held_ms": _ms(rates.hold_s.value),
            "first_token_error_ms": _ms(rates.error_s.value),
            "ttft_estimate_error_ms": _ms(rates.ttft_error_s.value),
        },
        "engine": None
        if load is None
        else {
            "running": load.running,
            "waiting": load.waiting,
            "workers": load.workers,
            "silent_ms": _ms(gate.work.signals.silent_s(now)),
        },
    }


def _limits(limits: AdmissionLimits, base: AdmissionLimits | None = None) -> dict[str, Any]:
    """Return all thresholds, or only those that differ from ``base``."""
    shown = asdict(limits)
    if base is None:
        return shown
    before = asdict(base)
    return {name: value for name, value in shown.items() if value != before[name]}


def _decision(at: float, event: Admitted | RefusedEvent) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "at": iso_time(at, "milliseconds"),
        "backend": event.backend,
        "tenant": event.tenant,
        "class": class_of(event.priority),
        "estimated_wait_ms": _ms(event.estimated_wait_s),
        "queue_depth": event.queue_depth,
        "in_flight": event.in_flight,
        "kv_usage": round(event.kv_usage, 4),
    }
    if isinstance(event, Admitted):
        return {
            **shown,
            "decision": "admitted",
            "waited_ms": _ms(event.waited_s),
            "shrunk": event.shrunk,
            "beyond_forecast": event.beyond,
        }
    return {
        **shown,
        "decision": "refused",
        "reason": event.reason.value,
        "retry_after_ms": _ms(event.retry_after_s),
        "queued": event.queued,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
