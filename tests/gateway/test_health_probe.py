"""Health answers for monitors, with backends that fail, hang or report nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from admission.values import BackendLoad
from gateway.backends.port import BackendState, Fleet
from gateway.backends.workers.inspection import Inspection, WorkerInspections
from gateway.errors import BackendUnavailable
from gateway.health.first_ready import FirstReady
from gateway.health.probe import HealthProbe
from gateway.health.rolling_stats import RollingStats
from gateway.requests.in_flight import InFlightRequests
from gateway.testing import FakeText
from gateway.wiring.observing import health_collector
from gateway.wiring.serving import first_ready
from observability.events import EngineFigures
from resilience.failures import BackendFailure, FailureKind
from tests.scripted import Script, ScriptedBackend
from tests.virtual_time import in_virtual_time

HANGS = Script(delay_s=3600.0)


async def no_gpus() -> Sequence[Mapping[str, float | None]]:
    return ()


async def no_workers(generate: bool) -> dict[str, list[Inspection]]:
    return {}


def load(running: int = 0, waiting: int = 0, kv_usage: float = 0.0) -> BackendLoad:
    return BackendLoad(running=running, waiting=waiting, kv_usage=kv_usage)


def probe(*backends: ScriptedBackend, **changes: Any) -> HealthProbe:
    settings: dict[str, Any] = {
        "fleet": Fleet({backend.name: backend for backend in backends}),
        "requests": InFlightRequests(),
        "rolling_stats": RollingStats(lambda: 0.0),
        "text": lambda model: FakeText(),
        "model_loaded": lambda: True,
        "engines": {},
        "engine_figures": dict,
        "state_store_ok": lambda: True,
        "inspections": WorkerInspections(no_workers),
        "routes": lambda: {"chat": [backend.name for backend in backends]},
        "clock": lambda: 0.0,
        "started_at": 0.0,
        "gpus": no_gpus,
    }
    return HealthProbe(**(settings | changes))


def test_backends_are_asked_at_once_so_that_two_that_hang_take_the_time_of_one() -> None:
    one, two = ScriptedBackend("one", scripts=(HANGS,)), ScriptedBackend("two", scripts=(HANGS,))
    healthy, report = in_virtual_time(probe(one, two, ScriptedBackend("three")).deep())
    results: Any = report["backends"]
    assert healthy and report["status"] == "degraded"
    assert {name: result.get("error") for name, result in results.items()} == {
        "one": "timeout", "two": "timeout", "three": None,
    }  # fmt: skip
    assert results["three"]["output_tokens"] == 3
    assert one.active == two.active == 0, "nothing is left of what was given up"
    [first], [second] = one.calls, two.calls
    assert first.generation_id != second.generation_id, "two backends may stand on one engine"


async def test_a_model_that_its_pool_no_longer_serves_when_the_probes_begin_is_left_out() -> None:
    backends = {name: ScriptedBackend(name) for name in ("pool/one", "pool/two")}
    asyncio.get_running_loop().call_soon(backends.pop, "pool/two")
    healthy, report = await probe(fleet=Fleet(backends), routes=lambda: {"chat": ["pool/one"]}).deep()
    assert healthy and report["status"] == "healthy"
    assert list(report["backends"]) == ["pool/one"]  # type: ignore[call-overload]


async def test_a_backend_that_fails_is_told_by_its_kind() -> None:
    broken = ScriptedBackend(scripts=(Script(failure=BackendFailure(FailureKind.NAN_OUTPUT, "x")),))
    healthy, report = await probe(broken).deep()
    assert not healthy
    assert report["backends"] == {"local": {"state": "ready", "status": "unhealthy", "error": "nan_output"}}


@pytest.mark.parametrize(
    ("routes", "status", "healthy"),
    [
        ({"chat": ["one", "two"]}, "degraded", True),
        ({"chat": ["two"], "code": ["one", "degraded"]}, "unhealthy", False),
        ({}, "degraded", True),
    ],
)
async def test_a_backend_down_is_degraded_while_every_route_has_another(
    routes: dict[str, list[str]], status: str, healthy: bool
) -> None:
    broken = ScriptedBackend("one", scripts=(Script(failure=BackendFailure(FailureKind.NAN_OUTPUT, "x")),))
    found, report = await probe(broken, ScriptedBackend("two"), routes=lambda: routes).deep()
    assert (report["status"], found) == (status, healthy)


async def test_an_embedded_engine_is_reported_once_however_many_backends_use_it() -> None:
    shared = load(running=3, waiting=2, kv_usage=0.5)
    figures = EngineFigures("demo", shared)
    backends = [ScriptedBackend(name, load=shared) for name in ("one", "two")]
    _, report = await probe(*backends, engine_figures=lambda: {"one": figures}).deep()
    assert (report["running"], report["waiting"], report["kv_utilization"]) == (3, 2, 0.5)


async def test_without_an_engine_the_remote_loads_are_added_up() -> None:
    one, two = (
        ScriptedBackend("one", load=load(3, 1, 0.5)),
        ScriptedBackend("two", load=load(2, 0, 0.7)),
    )
    _, report = await probe(one, two, ScriptedBackend("silent")).deep()
    assert (report["running"], report["waiting"], report["kv_utilization"]) == (5, 1, 0.7)
    _, report = await probe(ScriptedBackend("silent")).deep()
    assert (report["running"], report["waiting"], report["kv_utilization"]) == (None, None, None)


@pytest.mark.parametrize(
    "failing, changes",
    [
        ("model_loaded", {"model_loaded": lambda: False}),
        ("workers_ready", {"fleet": Fleet({"a": ScriptedBackend("a", state=BackendState.STARTING)})}),
        ("memory_available", {"fleet": Fleet({"a": ScriptedBackend("a", load=load(kv_usage=0.99))})}),
        ("state_store", {"state_store_ok": lambda: False}),
    ],
)
def test_each_check_alone_makes_it_not_ready_and_the_metrics_say_the_same(
    failing: str, changes: dict[str, Any]
) -> None:
    health = probe(ScriptedBackend(), **changes)
    ready, body = health.ready()
    checks: Any = body["checks"]
    assert not ready and [name for name, holds in checks.items() if not holds] == [failing]
    never = first_ready(health, clock=lambda: 0.0, unix_time=time.time)
    whole, each, after = health_collector(health, never).collect()
    assert whole.samples[0].value == 0.0
    assert {s.labels["check"]: s.value for s in each.samples} == {
        name: float(v) for name, v in checks.items()
    }
    assert after.samples == [], "it was never ready"


def test_the_gateway_stays_ready_while_one_pool_has_room() -> None:
    full, free = (ScriptedBackend("full", load=load(kv_usage=1.0)), ScriptedBackend("free", load=load()))
    assert probe(full, free).ready()[0]


async def test_a_gateway_that_was_ready_once_stays_alive() -> None:
    """The platform must not replace the container because the engine restarts."""
    loaded = False
    health = probe(ScriptedBackend(), model_loaded=lambda: loaded)
    first = FirstReady(lambda: health.ready()[0], lambda: 0.0)
    patient = replace(health, pings=lambda: first.after_s() is not None)
    with pytest.raises(BackendUnavailable):
        patient.ping()
    loaded = True
    assert patient.ping()["status"] == "healthy"
    loaded = False
    assert patient.ping()["status"] == "healthy"
    assert patient.ready()[0] is False
    assert (await patient.deep())[0]
