"""An outage is an error that says what is wrong, unless the route asks for stored text in its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from admission.estimator import LEARNED_FROM, PATIENCE_S
from admission.values import BackendLoad
from budgeting.values import Tool, ToolChoice, ToolChoiceMode
from gateway.backends.port import BackendState, Completion, DeltaSink, Work
from gateway.contracts.features import Feature
from gateway.contracts.values import Contract, FinishReason, FormatType, GenerateRequest, ResponseFormat
from resilience.failures import BackendFailure, FailureKind
from tests.journey.rig import JourneyRig, RestartingBackend
from tests.scripted import Script, ScriptedBackend
from tests.virtual_time import loop_time, virtual_time

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

NOTHING: Mapping[str, object] = {"fallback": [], "fallback_text_in": ["native"]}
NATIVE: Mapping[str, object] = {"fallback": ["response_cache", "degraded"], "fallback_text_in": ["native"]}


def loading(restart_s: float | None) -> RestartingBackend:
    backend = RestartingBackend(state=BackendState.STARTING)
    backend.restart_s, backend.loading, backend.waited_for = restart_s, True, asyncio.Event()
    return backend


@pytest.mark.parametrize(
    ("route", "contract"),
    [(NOTHING, Contract.NATIVE), (NOTHING, Contract.CHAT), (NATIVE, Contract.CHAT)],
    ids=["no fallback", "no fallback, openai's contract", "text for the native contract only"],
)
async def test_a_dead_backend_is_an_error_where_no_text_is_asked_for(
    build_rig: Build, ask: Ask, route: Mapping[str, object], contract: Contract
) -> None:
    rig = build_rig(backends=[ScriptedBackend(state=BackendState.DEAD)], route=route)
    sink = await rig.run(ask(contract=contract))
    assert sink.answer is None and sink.error is not None
    assert (sink.error.status, sink.error.code) == (503, "backend_unavailable")


async def test_the_native_contract_gets_the_text_that_its_route_asks_for(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=[ScriptedBackend(state=BackendState.DEAD)], route=NATIVE)
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.finish_reason is FinishReason.DEGRADED


SHAPED: Mapping[str, object] = {"response_format": ResponseFormat(FormatType.JSON_OBJECT)}
CALLING: Mapping[str, object] = {
    "tools": (Tool("look", parameters="{}"),),
    "needs": frozenset({Feature.TOOLS}),
    "tool_choice": ToolChoice(ToolChoiceMode.NAMED, "look"),
}


@pytest.mark.parametrize("contract", [Contract.NATIVE, Contract.CHAT])
@pytest.mark.parametrize("asked", [SHAPED, CALLING], ids=["a shape", "a call"])
async def test_the_degraded_text_is_no_answer_to_a_request_for_a_shape_or_a_call(
    build_rig: Build, ask: Ask, asked: Mapping[str, object], contract: Contract
) -> None:
    rig = build_rig(
        backends=[ScriptedBackend(state=BackendState.DEAD)],
        route={"fallback": ["response_cache", "degraded"]},
    )
    sink = await rig.run(ask(contract=contract, **asked))
    assert sink.answer is None and sink.error is not None
    assert (sink.error.status, sink.error.code) == (503, "backend_unavailable")
    plain = (await rig.run(ask(contract=contract))).answer
    assert plain is not None and plain.finish_reason is FinishReason.DEGRADED


async def test_a_stored_answer_is_not_given_in_openais_contract_either(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route=NATIVE)
    assert (await rig.run(ask(contract=Contract.CHAT))).answer is not None
    rig.backends["local"].state = BackendState.DEAD
    again = await rig.run(ask(contract=Contract.CHAT, request_id="req_2", generation_id="gen_2"))
    assert again.answer is None and again.error is not None and again.error.status == 503


@pytest.mark.parametrize("route", [NOTHING, NATIVE], ids=["no fallback", "degraded text"])
@virtual_time
async def test_a_request_that_arrives_while_the_engine_loads_waits_for_it(
    build_rig: Build, ask: Ask, route: Mapping[str, object]
) -> None:
    rig = build_rig(backends=[loading(0.2)], route=route)
    for deadline_s in (None, 30.0):
        rig.backends["local"].state = BackendState.STARTING
        deadline = None if deadline_s is None else loop_time() + deadline_s
        answer = (await rig.run(ask(f"Within {deadline_s} s?", deadline=deadline))).answer
        assert answer is not None and answer.fallback is None and answer.backend_name == "local"


@virtual_time
async def test_an_engine_that_loads_past_the_deadline_is_an_error_that_says_so(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(backends=[loading(60.0)], route=NOTHING)
    sink = await rig.run(ask(deadline=loop_time() + 0.1))
    assert sink.answer is None and sink.error is not None
    assert sink.error.status == 503 and (sink.error.retry_after_ms or 0) >= 1000
    assert sink.error.message == "backend_unavailable: the engine of local is away"


class Refusing(RestartingBackend):
    """A worker that has just died: the first call finds it out."""

    restart_s = 60.0

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        self.state = BackendState.STARTING
        raise BackendFailure(FailureKind.BACKEND_UNAVAILABLE, "refuses connections")


async def test_the_request_that_finds_a_worker_dead_does_not_wait_longer_than_those_after_it(
    build_rig: Build, ask: Ask
) -> None:
    backend = Refusing()
    backend.waited_for = asyncio.Event()
    rig = build_rig(backends=[backend], route=NATIVE)
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.finish_reason is FinishReason.DEGRADED
    assert not backend.waited_for.is_set()


async def test_a_request_with_a_short_deadline_does_not_spend_it_on_the_wait_for_a_dead_worker(
    build_rig: Build, ask: Ask
) -> None:
    clock, dead = Clock(), RestartingBackend(state=BackendState.STARTING)
    dead.ready_in_s, dead.waited_for = 1.0, asyncio.Event()
    backends, route = [dead, ScriptedBackend("other")], {"fallback": ["other", "degraded"]}
    rig = build_rig(backends=backends, route=route, clock=clock)
    answer = (await rig.run(ask(arrived_at=clock(), deadline=clock() + 1.5))).answer
    assert answer is not None and answer.fallback is not None and answer.fallback.kind == "other"
    assert not dead.waited_for.is_set()


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SlowToLoad(RestartingBackend):
    """A backend whose engine takes ``takes_s`` seconds of the clock to load."""

    def __init__(self, clock: Clock, takes_s: float, *scripts: Script) -> None:
        super().__init__(scripts=scripts or (Script(),))
        self.clock, self.takes_s, self.ready_in_s = clock, takes_s, takes_s
        self.loading, self.waited_for = True, asyncio.Event()

    async def wait_ready(self, timeout_s: float) -> bool:
        self.clock.now += min(self.takes_s, timeout_s)
        if self.takes_s <= timeout_s:
            self.state, self.ready_in_s = BackendState.READY, None
        return self.state is BackendState.READY


@pytest.mark.parametrize(
    "admission", [{}, {"refuse_late": True}], ids=["learned patience", "refused when late"]
)
async def test_the_wait_for_the_engine_does_not_count_against_the_admission_of_a_request(
    build_rig: Build, ask: Ask, admission: Mapping[str, object]
) -> None:
    clock = Clock()
    away_s = 6 * PATIENCE_S
    rig = build_rig(
        backends=[SlowToLoad(clock, away_s)], route={**NOTHING, "admission": admission}, clock=clock
    )
    for number in range(LEARNED_FROM):
        warm = await rig.run(ask(f"Number {number}?", arrived_at=clock(), deadline=clock() + 60.0))
        assert warm.answer is not None
    rig.backends["local"].state = BackendState.STARTING
    sink = await rig.run(ask("After it?", arrived_at=clock(), deadline=clock() + 60.0))
    assert sink.error is None and sink.answer is not None
    assert clock() >= 1000.0 + away_s


async def test_a_broken_request_is_admitted_again_where_a_route_refuses_what_is_late(
    build_rig: Build, ask: Ask
) -> None:
    clock = Clock()
    died = Script(failure=BackendFailure(FailureKind.ENGINE_DEAD, "gone"), breaks_after=0)
    engine = SlowToLoad(clock, 20.0, died, Script())
    engine.restart_s = 20.0
    rig = build_rig(backends=[engine], route={**NOTHING, "admission": {"refuse_late": True}}, clock=clock)
    sink = await rig.run(ask(arrived_at=clock(), deadline=clock() + 60.0))
    assert sink.error is None and sink.answer is not None and len(engine.calls) == 2


@virtual_time
async def test_after_the_wait_for_the_engine_the_deadline_ends_the_wait_for_a_place(
    build_rig: Build, ask: Ask
) -> None:
    engine = loading(0.01)
    rig = build_rig(backends=[engine], route=NOTHING)
    engine.load = BackendLoad(max_running=1)
    engine.scripts = [Script(delay_s=60.0)]
    gate = rig.admission.gate("local")
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(rig.run(ask()))
        while not gate.in_flight:  # noqa: ASYNC110 - a gate sets no event when it changes
            await asyncio.sleep(0.001)
        engine.state = BackendState.STARTING
        began = loop_time()
        late = await rig.run(ask(request_id="req_2", generation_id="gen_2", priority=1, deadline=began + 0.5))
        took_s = loop_time() - began
        first.cancel()
    assert late.answer is None and late.error is not None and late.error.status == 503
    assert 0.4 < took_s <= 0.5
    assert rig.in_use() == []


async def test_a_backend_that_answers_503_while_it_is_in_service_is_not_asked_again_at_once(
    build_rig: Build, ask: Ask
) -> None:
    busy = RestartingBackend(scripts=[Script(failure=BackendFailure(FailureKind.BACKEND_UNAVAILABLE, "503"))])
    busy.waited_for = asyncio.Event()
    rig = build_rig(backends=[busy], route=NOTHING)
    sink = await rig.run(ask())
    assert sink.error is not None and sink.error.status == 503
    assert len(busy.calls) == 1 and not busy.waited_for.is_set()


class Hanging(ScriptedBackend):
    """Its calls end with its own limit of 30 s."""

    clock: Clock

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        self.calls.append(work)
        self.clock.now += 30
        raise BackendFailure(FailureKind.TIMEOUT, "no token came")


async def test_a_backend_that_hangs_leaves_the_time_of_its_retry_to_the_next_leg(
    build_rig: Build, ask: Ask
) -> None:
    hanging, clock = Hanging(), Clock()
    hanging.clock = clock
    route = {"fallback": ["far", "degraded"], "timeout_ms": 60_000}
    rig = build_rig(backends=[hanging, ScriptedBackend("far")], route=route, clock=clock)
    answer = (await rig.run(ask(arrived_at=clock()))).answer
    assert answer is not None and answer.fallback is not None
    assert (answer.fallback.kind, answer.fallback.reason) == ("far", "timeout")
    assert len(hanging.calls) == 1
