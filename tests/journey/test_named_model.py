"""The model that a request names decides which backend answers, and the answer names the model that did."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adapters.values import Adapter
from gateway.backends.port import BackendState
from gateway.contracts.values import Contract, GenerateRequest
from tests.journey.rig import JourneyRig
from tests.scripted import ScriptedBackend

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

HALF = {"backends": [{"name": "a", "weight": 50}, {"name": "b", "weight": 50}]}


def two() -> list[ScriptedBackend]:
    return [ScriptedBackend("a", model="model-a"), ScriptedBackend("b", model="model-b")]


@pytest.mark.parametrize("name", ["a", "b"])
async def test_of_two_models_on_one_route_the_named_one_answers_every_session(
    build_rig: Build, ask: Ask, name: str
) -> None:
    rig = build_rig(backends=two(), route=HALF)
    for number in range(20):
        request = ask(
            contract=Contract.CHAT,
            model=f"model-{name}",
            request_id=f"req_{number}",
            generation_id=f"gen_{number}",
            session_id=f"s{number}",
        )
        answer = (await rig.run(request)).answer
        assert answer is not None
        assert (answer.backend_name, answer.model) == (name, f"model-{name}")
    assert {record.drawn for record in rig.records} == {None}, "no evidence for a canary"


async def test_without_a_model_both_answer_and_the_answer_names_the_one_that_did(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(backends=two(), route=HALF)
    seen = set()
    for number in range(40):
        request = ask(request_id=f"req_{number}", generation_id=f"gen_{number}", session_id=f"s{number}")
        answer = (await rig.run(request)).answer
        assert answer is not None
        seen.add((answer.backend_name, answer.model))
    assert seen == {("a", "model-a"), ("b", "model-b")}


async def test_a_model_that_only_the_fallback_chain_serves_is_answered_by_it(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(backends=two(), route={"fallback": ["b"]})
    answer = (await rig.run(ask(contract=Contract.CHAT, model="model-b"))).answer
    assert answer is not None and answer.fallback is None
    assert (answer.backend_name, answer.model) == ("b", "model-b")


async def test_a_model_that_no_backend_of_the_route_serves_is_refused(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=two())
    sink = await rig.run(ask(contract=Contract.CHAT, model="model-b"))
    assert sink.error is not None and (sink.error.status, sink.error.code) == (404, "unknown_model")


async def test_an_answer_of_a_fallback_model_names_that_model(build_rig: Build, ask: Ask) -> None:
    dead = ScriptedBackend("a", model="model-a", state=BackendState.DEAD)
    rig = build_rig(backends=[dead, two()[1]], route={"fallback": ["b"]})
    answer = (await rig.run(ask(contract=Contract.CHAT, model="model-a"))).answer
    assert answer is not None and answer.fallback is not None
    assert (answer.backend_name, answer.model) == ("b", "model-b")


async def test_an_adapter_is_served_by_its_base_model(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=two(), route=HALF, adapters=[Adapter("jp", 1, "model-b", "adapters/jp")])
    for number in range(10):
        request = ask(
            model="jp", request_id=f"req_{number}", generation_id=f"gen_{number}", session_id=f"s{number}"
        )
        answer = (await rig.run(request)).answer
        assert answer is not None and (answer.backend_name, answer.model) == ("b", "jp")
