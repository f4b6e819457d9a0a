"""A route may let the base model answer only for an adapter that cannot be loaded; the answer says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from msgspec.structs import replace

from adapters.catalogue import AdapterState
from adapters.selection import AdapterOffer
from adapters.values import Adapter
from gateway.backends.lora_slots import PARAM
from gateway.contracts.values import GenerateRequest
from resilience.failures import BackendFailure, FailureKind
from tests.journey.rig import JourneyRig
from tests.scripted import Script

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

ADAPTER = Adapter("jp_style_v1", 1, "scripted", "adapters/jp")
BASE: Mapping[str, object] = {"adapter_fallback": "base", "fallback": []}


def missing(kind: FailureKind = FailureKind.MODEL_NOT_FOUND) -> Script:
    return Script(pieces=(), failure=BackendFailure(kind, "adapter jp_style_v1: no file", param=PARAM))


async def test_the_base_model_answers_and_the_answer_says_so(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(missing(), Script(("From the base.",)), adapters=[ADAPTER], route=BASE)
    answer = (await rig.run(ask(adapter_id="jp_style_v1"))).answer
    assert answer is not None and answer.output_text == "From the base."
    assert answer.backend_version == "scripted" and answer.fallback is None
    assert answer.warnings == (
        "adapter jp_style_v1 could not be used (model_not_found); the base model answered",
    )
    assert [work.adapter for work in rig.backends["local"].calls] == [ADAPTER, None]
    assert rig.records[0].backend_version == "scripted" and rig.in_use() == []


async def test_a_part_of_an_answer_of_the_base_is_not_billed_as_the_adapters(
    build_rig: Build, ask: Ask
) -> None:
    broken = Script(breaks_after=2, failure=BackendFailure(FailureKind.STREAM_BROKEN, "gone"))
    rig = build_rig(missing(), broken, adapters=[ADAPTER], route=BASE)
    await rig.run(ask(adapter_id="jp_style_v1", stream=True))
    [row] = rig.outbox.rows
    assert (row.billable_output_tokens, row.adapter_id) == (2, None)


async def test_an_answer_of_the_base_is_not_kept_as_the_adapters(build_rig: Build, ask: Ask) -> None:
    route = {"adapter_fallback": "base", "fallback": ["response_cache", "degraded"]}
    down = Script(pieces=(), failure=BackendFailure(FailureKind.INTERNAL, "down", no_retry_here=True))
    rig = build_rig(missing(), Script(("From the base.",)), down, adapters=[ADAPTER], route=route)
    await rig.run(ask(adapter_id="jp_style_v1"))
    answer = (await rig.run(replace(ask(adapter_id="jp_style_v1"), generation_id="gen_2"))).answer
    assert answer is not None and answer.fallback is not None
    assert answer.fallback.kind == "degraded_response"


@pytest.mark.parametrize(
    ("route", "changes", "script"),
    [
        ({"fallback": []}, {}, missing()),
        (BASE, {"allow_fallback": False}, missing()),
        (
            BASE,
            {},
            Script(pieces=(), failure=BackendFailure(FailureKind.MODEL_NOT_FOUND, "no such model")),
        ),
    ],
    ids=["the route does not allow it", "the caller wants errors", "it is not the adapter that is missing"],
)
async def test_in_all_other_cases_the_failure_is_reported(
    build_rig: Build, ask: Ask, route: Mapping[str, object], changes: Mapping[str, object], script: Script
) -> None:
    rig = build_rig(script, adapters=[ADAPTER], route=route)
    sink = await rig.run(ask(adapter_id="jp_style_v1", **changes))
    assert sink.error is not None and sink.error.message.startswith("model_not_found")
    assert all(work.adapter == ADAPTER for work in rig.backends["local"].calls)


async def test_when_the_base_fails_too_the_chain_goes_on(build_rig: Build, ask: Ask) -> None:
    down = Script(pieces=(), failure=BackendFailure(FailureKind.INTERNAL, "down", no_retry_here=True))
    route = {"adapter_fallback": "base", "fallback": ["degraded"]}
    rig = build_rig(missing(FailureKind.THROTTLED), down, adapters=[ADAPTER], route=route)
    answer = (await rig.run(ask(adapter_id="jp_style_v1"))).answer
    assert answer is not None and answer.fallback is not None
    assert answer.fallback.kind == "degraded_response"
    assert "base model answered" not in " ".join(answer.warnings)


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_rule_that_leads_to_what_is_not_served_leaves_the_base_where_the_route_allows(
    build_rig: Build, ask: Ask, allowed: bool
) -> None:
    rules = {"adapter_rules": [{"when": {}, "adapter": "jp_style_v1"}]}
    rig = build_rig(Script(("Base.",)), adapters=[ADAPTER], route={**(BASE if allowed else {}), **rules})
    rig.adapters.offer(AdapterOffer({"jp_style_v1": ADAPTER}, {"jp_style_v1": AdapterState.RETIRED}))
    sink = await rig.run(ask())
    if allowed:
        assert sink.answer is not None and sink.answer.backend_version == "scripted"
        assert sink.answer.warnings == (
            "adapter jp_style_v1 could not be used (not served); the base model answered",
        )
    else:
        assert sink.error is not None and sink.error.code == "unknown_adapter"
    assert rig.in_use() == []
