"""Fields unknown to Sluice: by the backend's setting refused by name, dropped and named, or passed on."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from gateway.config.backends import BedrockSection, EngineBackend, OpenAIBackend, UnknownFields
from gateway.contracts.features import KNOWN_FEATURES, Feature
from gateway.contracts.native_answer import NativeDialect
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest
from tests.journey.rig import JourneyRig
from tests.scripted import ScriptedBackend

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

UNKNOWN = {"extra": {"frobnicate": [1]}, "needs": frozenset({Feature.UNKNOWN_FIELDS})}
VLLMS = {"extra": {"bad_words": ["no"]}, "needs": frozenset({Feature.FIELDS_PASSED})}
ORIGIN = RequestOrigin("req", "gen", Caller("tenant", CallerRole.CALLER, "key"), 0.0, 0, "0" * 32)


def backend(policy: UnknownFields) -> ScriptedBackend:
    return ScriptedBackend("a", features=KNOWN_FEATURES | policy.features)


@pytest.mark.parametrize(
    ("policy", "asked"),
    [(UnknownFields.REFUSE, UNKNOWN), (UnknownFields.REFUSE, VLLMS), (UnknownFields.DROP, VLLMS)],
)
async def test_a_field_that_the_backend_does_not_take_is_refused_by_its_name(
    build_rig: Build, ask: Ask, policy: UnknownFields, asked: dict[str, object]
) -> None:
    rig = build_rig(backends=[backend(policy)])
    sink = await rig.run(ask(contract=Contract.CHAT, **asked))
    [name] = asked["extra"]  # type: ignore[misc]
    assert sink.error is not None and (sink.error.status, sink.error.param) == (422, name)
    [record] = rig.records
    assert (record.status, record.error_param) == (400, name), "the status that is sent on OpenAI's paths"
    assert record.error_message == sink.error.message and name in sink.error.message
    assert ("is not a known field" in sink.error.message) == (asked is UNKNOWN)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (UNKNOWN | {"extra": {"a": 1, "b": 2}}, "a, b are not known fields; leave them out"),
        (VLLMS | {"extra": {"bad_words": [], "allowed_token_ids": []}}, "are fields of vLLM workers"),
    ],
)
async def test_a_refusal_of_several_fields_speaks_of_several(
    build_rig: Build, ask: Ask, asked: dict[str, object], said: str
) -> None:
    sink = await build_rig(backends=[backend(UnknownFields.REFUSE)]).run(ask(contract=Contract.CHAT, **asked))
    assert sink.error is not None and said in sink.error.message


async def test_a_late_refusal_names_the_bodys_field_in_the_log_and_in_the_answer(build_rig: Build) -> None:
    rig = build_rig()
    chat = {
        "model": "base",
        "messages": [{"role": "user", "content": "hi"}],
        "sluice": {"route": "none"},
    }
    native = {"messages": chat["messages"], "route": "none"}
    names = []
    for dialect, body in ((OpenAIDialect(chat=True), chat), (NativeDialect(), native)):
        sink = await rig.run(dialect.parse(json.dumps(body).encode(), ORIGIN).request)
        assert sink.error is not None and rig.records[-1].error_message == sink.error.message
        names.append((sink.error.param, rig.records[-1].error_param))
    assert names == [("sluice.route",) * 2, ("route",) * 2]


async def test_a_dropped_field_is_named_in_the_answer(build_rig: Build, ask: Ask) -> None:
    dropping = backend(UnknownFields.DROP)
    sink = await build_rig(backends=[dropping]).run(ask(contract=Contract.CHAT, **UNKNOWN))
    assert sink.answer is not None
    assert sink.answer.warnings == ("frobnicate is not a known field and was dropped",)
    assert not dropping.calls[0].extra


async def test_an_unknown_field_of_a_message_is_dropped_and_named_or_refused_by_its_path(
    build_rig: Build, ask: Ask
) -> None:
    inner = {"dropped": ("messages.0.frob",), "needs": UNKNOWN["needs"], "contract": Contract.CHAT}
    for policy in (UnknownFields.DROP, UnknownFields.PASS):
        sink = await build_rig(backends=[backend(policy)]).run(ask(**inner))
        assert sink.answer is not None
        assert sink.answer.warnings == ("messages.0.frob is not a known field and was dropped",)
    sink = await build_rig(backends=[backend(UnknownFields.REFUSE)]).run(ask(**inner))
    assert sink.error is not None and sink.error.param == "messages.0.frob"


@pytest.mark.parametrize("asked", [UNKNOWN, VLLMS])
async def test_a_passed_field_reaches_the_backend(
    build_rig: Build, ask: Ask, asked: dict[str, object]
) -> None:
    passing = backend(UnknownFields.PASS)
    sink = await build_rig(backends=[passing]).run(ask(contract=Contract.CHAT, **asked))
    assert sink.answer is not None and not sink.answer.warnings
    assert passing.calls[0].extra == asked["extra"]


def test_by_default_only_vllm_workers_are_given_unknown_fields() -> None:
    def workers(**more: object) -> frozenset[Feature]:
        given = {"kind": "openai", "base_urls": ["http://w:1/v1"], "model": "m", **more}
        return OpenAIBackend.model_validate(given).unknown_features

    passed = frozenset({Feature.UNKNOWN_FIELDS, Feature.FIELDS_PASSED})
    assert workers() == workers(dialect="vllm") == passed
    assert workers(dialect="openai") == workers(dialect="sluice") == workers(unknown_fields="refuse")
    assert workers(dialect="openai", unknown_fields="drop") == {Feature.UNKNOWN_FIELDS}
    assert EngineBackend(kind="engine").unknown_fields is UnknownFields.REFUSE
    assert not BedrockSection(kind="bedrock", model_id="m", region="us-east-1").unknown_fields.features
