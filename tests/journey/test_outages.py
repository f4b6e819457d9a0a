"""An outage is an error that says what is wrong, unless the route asks for stored text in its place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import pytest

from gateway.backends.port import BackendState
from gateway.backends.scripted import ScriptedBackend
from gateway.contracts.values import Contract, FinishReason, GenerateRequest
from tests.journey.house import House, RestartingBackend

Build = Callable[..., House]
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
    build_house: Build, ask: Ask, route: Mapping[str, object], contract: Contract
) -> None:
    house = build_house(backends=[ScriptedBackend(state=BackendState.DEAD)], route=route)
    sink = await house.run(ask(contract=contract))
    assert sink.answer is None and sink.error is not None
    assert (sink.error.status, sink.error.code) == (503, "backend_unavailable")


async def test_the_native_contract_gets_the_text_that_its_route_asks_for(
    build_house: Build, ask: Ask
) -> None:
    house = build_house(backends=[ScriptedBackend(state=BackendState.DEAD)], route=NATIVE)
    answer = (await house.run(ask())).answer
    assert answer is not None and answer.finish_reason is FinishReason.DEGRADED


async def test_a_kept_answer_is_kept_from_openais_contract_too(build_house: Build, ask: Ask) -> None:
    house = build_house(route=NATIVE)
    assert (await house.run(ask(contract=Contract.CHAT))).answer is not None
    house.backends["local"].state = BackendState.DEAD
    again = await house.run(ask(contract=Contract.CHAT, request_id="req_2", generation_id="gen_2"))
    assert again.answer is None and again.error is not None and again.error.status == 503


@pytest.mark.parametrize("route", [NOTHING, NATIVE], ids=["no fallback", "degraded text"])
async def test_a_request_that_arrives_while_the_engine_loads_waits_for_it(
    build_house: Build, ask: Ask, route: Mapping[str, object]
) -> None:
    house = build_house(backends=[loading(0.2)], route=route)
    for deadline_s in (None, 30.0):
        house.backends["local"].state = BackendState.STARTING
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        answer = (await house.run(ask(f"Within {deadline_s} s?", deadline=deadline))).answer
        assert answer is not None and answer.fallback is None and answer.backend_name == "local"


async def test_an_engine_that_loads_past_the_deadline_is_an_error_that_says_so(
    build_house: Build, ask: Ask
) -> None:
    house = build_house(backends=[loading(60.0)], route=NOTHING)
    sink = await house.run(ask(deadline=time.monotonic() + 0.1))
    assert sink.answer is None and sink.error is not None
    assert sink.error.status == 503 and (sink.error.retry_after_ms or 0) >= 1000
    assert sink.error.message == "backend_unavailable: the engine of local is away"
