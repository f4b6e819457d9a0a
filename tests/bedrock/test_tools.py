"""Tools over Converse: the request, checked by the service's own description, and the answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.bedrock.requests import RequestChecker
from benchmarks.bedrock.stand_in import Behaviour, StandIn
from budgeting.values import ImageContent, Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode, ToolKind
from gateway.backends.bedrock.answer import (
    CALLS_WITHOUT_TOOLS,
    ConverseReader,
    ConverseStop,
    ConverseUsage,
    Event,
)
from gateway.backends.bedrock.request import NO_OUTPUT, ConverseWriter
from gateway.backends.bedrock.tools import ConverseTools
from gateway.backends.port import Completion, Work
from gateway.backends.tool_deltas import CALLS_NOT_ALLOWED
from gateway.contracts.events import AnswerFold, Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.features import Feature
from gateway.contracts.images import ImageData
from gateway.contracts.values import FinishReason, FormatType, ResponseFormat
from resilience.failures import BackendFailure, FailureKind
from tests.bedrock.conftest import HAIKU, MakeBackend
from tests.bedrock.support import ASSISTANT, SYSTEM, USER, failure_of, work
from tests.conformance.harness import CollectedAnswer, collect
from tests.images.samples import sample

CHECKER = RequestChecker()
SONNET = "us.anthropic.claude-sonnet-4-5-20250929-v1:0"
SCHEMA = '{"type":"object","properties":{"sku":{"type":"string"}}}'
STOCK = Tool("stock", description="Copies in stock", parameters=SCHEMA)
ORDER = Tool("order status", parameters='{"properties":{"id":{"type":"integer"}}}')
ASKED = Message(USER, "Is it there?")
CALLED = Message(
    ASSISTANT, "", tool_calls=(ToolCall("a", "stock", '{"sku":"A1"}'), ToolCall("b", "stock", '{"sku":"B2"}'))
)


def result_of(call_id: str, text: str) -> Message:
    return Message(Role.TOOL, text, tool_call_id=call_id)


HISTORY = (ASKED, CALLED, result_of("b", "2"), result_of("a", "1"))


def asked(*messages: Message, **fields: Any) -> Work:
    return replace(work(*(messages or (ASKED,))), **fields)


def written(one: Work, *, model: str = HAIKU, cached: bool = False) -> dict[str, Any]:
    request = ConverseWriter(model, lambda messages: cached).request(one, ConverseTools(one))
    assert CHECKER.faults("converse", request) == CHECKER.faults("converse-stream", request) == []
    return request


def refused(one: Work) -> BackendFailure:
    with pytest.raises(BackendFailure) as caught:
        written(one)
    assert caught.value.kind is FailureKind.INVALID_INPUT
    return caught.value


def folded(collected: CollectedAnswer) -> AnswerFold:
    """Fold the answer's events; an event that is not allowed raises."""
    fold = AnswerFold()
    for event in collected.deltas:
        fold.take(event)
    fold.end([collected.completion.finish_reason])
    return fold


# The request


def test_tools_are_sent_with_their_schemas_in_order() -> None:
    config = written(asked(tools=(STOCK, Tool("bare"))))["toolConfig"]
    assert config == {
        "tools": [
            {
                "toolSpec": {
                    "name": "stock",
                    "description": "Copies in stock",
                    "inputSchema": {"json": json.loads(SCHEMA)},
                }
            },
            {
                "toolSpec": {
                    "name": "bare",
                    "description": "bare",
                    "inputSchema": {"json": {"type": "object"}},
                }
            },
        ]
    }


@pytest.mark.parametrize("blank", [None, "", " \n"])
def test_a_tool_without_description_gets_its_name_as_one(blank: str | None) -> None:
    (tool,) = written(asked(tools=(Tool("stock", description=blank),)))["toolConfig"]["tools"]
    assert tool["toolSpec"]["description"] == "stock"


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (None, None),
        (ToolChoice(), {"auto": {}}),
        (ToolChoice(ToolChoiceMode.REQUIRED), {"any": {}}),
        (ToolChoice(ToolChoiceMode.NAMED, "stock"), {"tool": {"name": "stock"}}),
    ],
)
def test_a_choice_is_sent_as_converse_has_it(choice: ToolChoice | None, sent: object) -> None:
    assert written(asked(tools=(STOCK,), tool_choice=choice))["toolConfig"].get("toolChoice") == sent


def test_with_the_choice_none_no_tools_are_sent() -> None:
    assert "toolConfig" not in written(asked(tools=(STOCK,), tool_choice=ToolChoice(ToolChoiceMode.NONE)))


def test_with_the_choice_none_and_calls_in_the_history_tools_are_sent_without_a_choice() -> None:
    config = written(asked(*HISTORY, tools=(STOCK,), tool_choice=ToolChoice(ToolChoiceMode.NONE)))[
        "toolConfig"
    ]
    assert [tool["toolSpec"]["name"] for tool in config["tools"]] == ["stock"] and "toolChoice" not in config


def test_only_allowed_tools_are_sent() -> None:
    choice = ToolChoice(ToolChoiceMode.REQUIRED, allowed=("stock",))
    config = written(asked(tools=(Tool("other"), STOCK), tool_choice=choice))["toolConfig"]
    assert [tool["toolSpec"]["name"] for tool in config["tools"]] == ["stock"]
    assert config["toolChoice"] == {"any": {}}


async def test_a_call_of_a_tool_that_is_not_allowed_reaches_no_caller(
    bedrock: StandIn, make: MakeBackend
) -> None:
    bedrock.script(Behaviour(calls=CALLS))
    choice = ToolChoice(allowed=("other",))
    failure = await failure_of(make(), asked(tools=(Tool("other"), STOCK), tool_choice=choice))
    assert failure.kind is FailureKind.DEGENERATE_OUTPUT and "not allowed" in str(failure)


def test_tools_of_the_history_are_sent_as_stubs_where_the_request_has_none() -> None:
    (tool,) = written(asked(*HISTORY))["toolConfig"]["tools"]
    assert tool["toolSpec"] == {
        "name": "stock",
        "description": "stock",
        "inputSchema": {"json": {"type": "object"}},
    }


def test_results_are_one_user_turn_in_the_order_of_the_calls_and_empty_text_is_left_out() -> None:
    assert written(asked(*HISTORY, Message(USER, "And?"), tools=(STOCK,)))["messages"] == [
        {"role": "user", "content": [{"text": "Is it there?"}]},
        {
            "role": "assistant",
            "content": [
                {"toolUse": {"toolUseId": "a", "name": "stock", "input": {"sku": "A1"}}},
                {"toolUse": {"toolUseId": "b", "name": "stock", "input": {"sku": "B2"}}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"toolResult": {"toolUseId": "a", "content": [{"text": "1"}]}},
                {"toolResult": {"toolUseId": "b", "content": [{"text": "2"}]}},
                {"text": "And?"},
            ],
        },
    ]


def test_text_comes_before_the_calls_of_its_message_and_a_result_is_never_empty() -> None:
    called = Message(ASSISTANT, "Let me look.", tool_calls=(ToolCall("a", "stock", ""),))
    _, calls, results = written(asked(ASKED, called, result_of("a", " ")))["messages"]
    assert calls["content"] == [
        {"text": "Let me look."},
        {"toolUse": {"toolUseId": "a", "name": "stock", "input": {}}},
    ]
    assert results["content"][0]["toolResult"]["content"] == [{"text": NO_OUTPUT}]


def test_images_of_a_result_are_blocks_of_it_in_their_places() -> None:
    image = {"image": {"format": "png", "source": {"bytes": sample("png")}}}
    parts = ("Page 1", ImageContent(sha256="a"))
    mixed, alone = result_of("a", "Page 1"), result_of("b", "")
    history = (ASKED, CALLED, replace(mixed, parts=parts), replace(alone, parts=parts[1:]))
    images = {"a": ImageData("image/png", memoryview(sample("png")))}
    *_, last = written(asked(*history, images=images))["messages"]
    assert [block["toolResult"]["content"] for block in last["content"]] == [
        [{"text": "Page 1"}, image],
        [image],
    ]


def test_evidence_after_results_follows_them() -> None:
    evidence = Message(SYSTEM, "Evidence:\n[1] Four copies.")
    *_, last = written(asked(ASKED, CALLED, evidence, result_of("a", "1"), result_of("b", "2")))["messages"]
    assert [next(iter(block)) for block in last["content"]] == ["toolResult", "toolResult", "text"]


@pytest.mark.parametrize(
    "text", ['{"sku":', "[1]", "3", '{"a": NaN}', '{"a": 1e400}', "{}" * 2, '{"a":' * 400 + "1" + "}" * 400]
)
def test_arguments_that_are_no_object_are_refused_with_their_call_named(text: str) -> None:
    called = Message(ASSISTANT, "", tool_calls=(ToolCall("call_7", "stock", text),))
    failure = refused(asked(ASKED, called, result_of("call_7", "1")))
    assert "'call_7'" in str(failure) and "'stock'" in str(failure) and failure.param == "messages"


def test_free_text_of_a_custom_tool_in_the_history_is_an_input() -> None:
    called = Message(ASSISTANT, "", tool_calls=(ToolCall("a", "sql", "select 1", ToolKind.CUSTOM),))
    _, calls, _ = written(asked(ASKED, called, result_of("a", "1")))["messages"]
    assert calls["content"][0]["toolUse"]["input"] == {"input": "select 1"}


@pytest.mark.parametrize(
    ("history", "says"),
    [
        ((ASKED, CALLED, result_of("a", "1")), "'b' has no result"),
        ((ASKED, CALLED, result_of("a", "1"), Message(USER, "Stop")), "'b' has no result"),
        ((ASKED, result_of("x", "1")), "'x' does not follow"),
        ((ASKED, CALLED, result_of("a", "1"), result_of("a", "1")), "'a' does not follow"),
        ((ASKED, Message(ASSISTANT, "", tool_calls=CALLED.tool_calls[:1] * 2)), "same id"),
    ],
)
def test_calls_and_results_that_do_not_match_are_refused_by_name(
    history: tuple[Message, ...], says: str
) -> None:
    failure = refused(asked(*history, tools=(STOCK,)))
    assert says in str(failure) and "allowed:" in str(failure)


@given(st.lists(st.text(min_size=1, max_size=90), min_size=1, max_size=6, unique=True), st.integers(0, 5))
def test_any_names_and_ids_become_ones_that_the_service_takes_and_names_come_back(
    names: list[str], called: int
) -> None:
    calls = tuple([ToolCall(f"{name}/{name}", name, "{}") for name in names])
    history = (ASKED, Message(ASSISTANT, "", tool_calls=calls), *[result_of(call.id, "1") for call in calls])
    one = asked(*history, *history, tools=tuple([Tool(name) for name in names[called:]]))
    written(one)
    tools = ConverseTools(one)
    sent = [
        block["toolUse"]["name"] for block in written(one)["messages"][1]["content"] if "toolUse" in block
    ]
    assert [tools.original(name) for name in sent] == names


def test_a_name_keeps_its_replacement_in_every_request_and_never_takes_another_tools_name() -> None:
    first = written(asked(tools=(ORDER,)))["toolConfig"]["tools"][0]["toolSpec"]["name"]
    assert re.fullmatch(r"order_status_[0-9a-f]{16}", first)
    names = [
        tool["toolSpec"]["name"] for tool in written(asked(tools=(ORDER, Tool(first))))["toolConfig"]["tools"]
    ]
    assert names[1] == first != names[0]


def test_a_cache_point_follows_the_tools_where_caching_is_on_and_the_model_takes_it() -> None:
    point = {"cachePoint": {"type": "default"}}
    one = asked(Message(SYSTEM, "Be kind."), ASKED, tools=(STOCK,))
    request = written(one, cached=True)
    assert request["toolConfig"]["tools"][-1] == point and request["system"][-1] == point
    assert point not in written(one)["toolConfig"]["tools"]
    nova = written(one, model="amazon.nova-lite-v1:0", cached=True)
    assert point not in nova["toolConfig"]["tools"] and nova["system"][-1] == point


def test_strict_is_sent_to_models_that_take_it_with_a_closed_schema() -> None:
    one = asked(tools=(Tool("stock", parameters=SCHEMA, strict=True),))
    spec = written(one, model=SONNET)["toolConfig"]["tools"][0]["toolSpec"]
    assert spec["strict"] is True and spec["inputSchema"]["json"]["additionalProperties"] is False
    assert "strict" not in written(one)["toolConfig"]["tools"][0]["toolSpec"]


def test_a_schema_of_the_answer_is_sent_closed_to_models_that_take_it(make: MakeBackend) -> None:
    schema = {
        "type": ["object", "null"],
        "properties": {"type": {"enum": [{"type": "object"}]}, "enum": {"type": "object"}},
        "anyOf": [{"type": "object", "additionalProperties": True}],
    }
    shape = ResponseFormat(FormatType.JSON_SCHEMA, json.dumps(schema))
    sent = written(asked(response_format=shape), model=SONNET)["outputConfig"]["textFormat"]
    assert sent["type"] == "json_schema"
    assert json.loads(sent["structure"]["jsonSchema"]["schema"]) == {
        "type": ["object", "null"],
        "properties": {
            "type": {"enum": [{"type": "object"}]},
            "enum": {"type": "object", "additionalProperties": False},
        },
        "anyOf": [{"type": "object", "additionalProperties": True}],
        "additionalProperties": False,
    }
    assert Feature.RESPONSE_FORMAT in make(model_id=SONNET).features
    assert Feature.RESPONSE_FORMAT not in make().features


@pytest.mark.parametrize("model", [HAIKU, SONNET])
def test_another_shape_is_refused_with_what_is_allowed(model: str) -> None:
    with pytest.raises(BackendFailure, match="regex") as caught:
        written(asked(response_format=ResponseFormat(FormatType.REGEX, "a+")), model=model)
    assert caught.value.kind is FailureKind.INVALID_INPUT and caught.value.param == "response_format"
    assert ("json_schema" in str(caught.value)) is (model == SONNET)


# The answer

CALLS = (("stock", ('{"sku"', ':"A1"}')), ("stock", ('{"sku":"B2"}',)))


@pytest.mark.parametrize("streaming", [True, False])
async def test_reasoning_text_and_calls_come_in_order_streamed_and_whole(
    bedrock: StandIn, make: MakeBackend, streaming: bool
) -> None:
    bedrock.script(Behaviour(pieces=("Let me", " look."), reasoning=("It", " asks"), calls=CALLS))
    collected = await collect(make(streaming=streaming), asked(tools=(STOCK,)))
    answer = folded(collected)
    assert (answer.text(), answer.reasoning()) == ("Let me look.", "It asks")
    assert answer.tool_calls() == (
        ToolCall("tooluse_0", "stock", '{"sku":"A1"}'),
        ToolCall("tooluse_1", "stock", '{"sku":"B2"}'),
    )
    assert collected.completion.finish_reason is FinishReason.TOOL_CALLS
    assert 0 < collected.completion.usage.reasoning_tokens <= 2
    assert collected.tokens == collected.completion.usage.output_tokens
    assert collected.deltas[0].queue_wait_s is not None


async def test_a_replaced_name_comes_back_as_the_callers(bedrock: StandIn, make: MakeBackend) -> None:
    sent = written(asked(tools=(ORDER,)))["toolConfig"]["tools"][0]["toolSpec"]["name"]
    bedrock.script(Behaviour(pieces=(), calls=((sent, ('{"id":1}',)),)))
    collected = await collect(make(), asked(tools=(ORDER,)))
    assert [call.name for call in folded(collected).tool_calls()] == ["order status"]
    assert bedrock.last["toolConfig"]["tools"][0]["toolSpec"]["name"] == sent


PATCH = Tool("patch", ToolKind.CUSTOM, "Edits a file.")
TEXT = '*** "Begin"\n\u00e9\U0001f600\\'


def test_a_custom_tool_is_sent_as_a_function_of_one_text() -> None:
    spec = written(asked(tools=(PATCH,)), model=SONNET)["toolConfig"]["tools"][0]["toolSpec"]
    assert (spec["name"], spec["description"], spec["strict"]) == ("patch", "Edits a file.", True)
    assert spec["inputSchema"]["json"]["required"] == ["input"]
    named = asked(tools=(PATCH,), tool_choice=ToolChoice(ToolChoiceMode.NAMED, "patch"))
    assert written(named)["toolConfig"]["toolChoice"] == {"tool": {"name": "patch"}}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("given", [json.dumps({"input": TEXT}), json.dumps({"text": TEXT})])
async def test_the_text_of_a_custom_tools_call_is_unwrapped_streamed_and_whole(
    bedrock: StandIn, make: MakeBackend, streaming: bool, given: str
) -> None:
    pieces = tuple([given[at : at + 3] for at in range(0, len(given), 3)])
    bedrock.script(Behaviour(calls=(("patch", pieces), ("stock", ('{"sku":"A1"}',)))))
    collected = await collect(make(streaming=streaming), asked(tools=(STOCK, PATCH)))
    patch, stock = folded(collected).tool_calls()
    assert patch.kind is ToolKind.CUSTOM and stock == ToolCall("tooluse_1", "stock", '{"sku":"A1"}')
    if "input" in json.loads(given):
        assert patch.arguments == TEXT
    else:
        assert json.loads(patch.arguments) == {"text": TEXT}, "what the model wrote"
    assert collected.tokens == collected.completion.usage.output_tokens


async def test_a_custom_tools_text_that_the_limit_cuts_is_given_up_to_there(
    bedrock: StandIn, make: MakeBackend
) -> None:
    bedrock.script(Behaviour(pieces=(), calls=(("patch", ('{"input":"ab', 'c"}')),)))
    collected = await collect(make(), replace(work(max_tokens=1), tools=(PATCH,)))
    answer = folded(collected)
    assert answer.in_call() and answer.tool_calls()[0].arguments == "ab"


def test_a_grammar_of_a_custom_tool_is_not_declared(make: MakeBackend) -> None:
    assert Feature.CUSTOM_TOOLS in make().features and Feature.TOOL_GRAMMARS not in make().features


async def test_a_call_without_arguments_has_an_empty_object(bedrock: StandIn, make: MakeBackend) -> None:
    bedrock.script(Behaviour(pieces=(), calls=(("stock", ()),)))
    assert folded(await collect(make(), asked(tools=(STOCK,)))).tool_calls()[0].arguments == "{}"


@pytest.mark.parametrize("streaming", [True, False])
async def test_without_parallel_calls_the_first_is_kept_and_the_warning_says_so(
    bedrock: StandIn, make: MakeBackend, streaming: bool
) -> None:
    backend, one = make(streaming=streaming), asked(tools=(STOCK,), parallel_tool_calls=False)
    bedrock.script(Behaviour(calls=CALLS), Behaviour(calls=CALLS[:1]))
    collected = await collect(backend, one)
    assert [call.id for call in folded(collected).tool_calls()] == ["tooluse_0"]
    assert collected.completion.warnings == (
        "parallel_tool_calls is false: the first call of the model is given, and 1 more were left out",
    )
    assert collected.completion.finish_reason is FinishReason.TOOL_CALLS
    assert (await collect(backend, one)).completion.warnings == ()


@pytest.mark.parametrize(
    ("choice", "warning"),
    [(None, CALLS_WITHOUT_TOOLS), (ToolChoice(ToolChoiceMode.NONE), CALLS_NOT_ALLOWED)],
)
async def test_calls_that_the_request_rules_out_are_left_out_of_the_answer_and_a_warning_says_so(
    bedrock: StandIn, make: MakeBackend, choice: ToolChoice | None, warning: str
) -> None:
    bedrock.script(Behaviour(pieces=("Yes.",), calls=CALLS))
    tools = () if choice is None else (STOCK,)
    one = asked(*HISTORY, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    collected = await collect(make(), one)
    answer = folded(collected)
    assert (answer.text(), answer.tool_calls()) == ("Yes.", ())
    assert collected.completion.finish_reason is FinishReason.STOP
    assert collected.completion.warnings == (warning,)


async def test_a_call_that_the_limit_cuts_is_not_ended(bedrock: StandIn, make: MakeBackend) -> None:
    bedrock.script(Behaviour(pieces=(), calls=(("stock", ('{"sku"', ':"A1"}')),)))
    collected = await collect(make(), replace(work(max_tokens=1), tools=(STOCK,)))
    answer = folded(collected)
    assert collected.completion.finish_reason is FinishReason.LENGTH
    assert answer.in_call() and answer.tool_calls()[0].arguments == '{"sku"'


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_call_that_the_model_could_not_write_is_a_named_failure(
    bedrock: StandIn, make: MakeBackend, streaming: bool
) -> None:
    bedrock.script(Behaviour(calls=CALLS, stop_reason="malformed_tool_use"))
    failure = await failure_of(make(streaming=streaming), asked(tools=(STOCK,)))
    assert failure.kind is FailureKind.DEGENERATE_OUTPUT and "malformed_tool_use" in str(failure)


async def test_a_stream_that_breaks_in_a_call_is_a_broken_stream(bedrock: StandIn, make: MakeBackend) -> None:
    bedrock.script(Behaviour(pieces=(), calls=CALLS, after=1, fault="cut"))
    failure = await failure_of(make(regions=["us-west-2"]), asked(tools=(STOCK,)))
    assert failure.kind is FailureKind.STREAM_BROKEN
    assert bedrock.regions == ["us-east-1"]


async def test_tools_count_in_the_estimate_of_the_prompt(bedrock: StandIn, make: MakeBackend) -> None:
    long = Tool("stock", description="word " * 400)
    failure = await failure_of(make(max_input_tokens=200), asked(tools=(long,)))
    assert failure.kind is FailureKind.TOKEN_LIMIT_EXCEEDED and bedrock.seen == []


def read(events: list[Event], cuts: list[int], one: Work) -> tuple[list[Delta], Completion]:
    reader, given = ConverseReader(ConverseTools(one), 0.0, 7, stops=one.sampling.stop), []
    for start, end in zip([0, *cuts], [*cuts, len(events)], strict=True):
        given += reader.feed(events[start:end])
    rest, completion = reader.finish()
    return given + rest, completion


def test_two_calls_with_one_id_are_two_calls_with_ids_of_their_own() -> None:
    events: list[Event] = []
    for text in ('{"sku":"A1"}', '{"sku":"B2"}'):
        events += [ToolBegin("stock", 0, id="t"), ToolArgs(text, 0), ToolEnd("", 0)]
    events += [ConverseStop("tool_use"), ConverseUsage(5, 2, 1, 30, 0)]
    first, second = folded(CollectedAnswer(*read(events, [], asked(tools=(STOCK,))))).tool_calls()
    assert (first.id, first.arguments, second.arguments) == ("t", '{"sku":"A1"}', '{"sku":"B2"}')
    assert second.id not in ("t", "")


@given(st.data(), st.booleans())
def test_an_answer_is_the_same_however_its_events_come(data: st.DataObject, single: bool) -> None:
    block = st.one_of(
        st.sampled_from(["a", " \n", "b\n"]).map(lambda text: [Delta(text, 0)]),
        st.sampled_from(["x", "y"]).map(lambda text: [Reasoning(text, 0)]),
        st.lists(st.sampled_from(["1", "2"]), max_size=3).map(
            lambda texts: [
                ToolBegin("stock", 0, id="?"), *[ToolArgs(text, 0) for text in texts], ToolEnd("", 0)
            ]
        ),
    )  # fmt: skip
    blocks = data.draw(st.lists(block, max_size=6))
    events: list[Event] = []
    for number, one in enumerate(blocks):
        events += [ToolBegin("stock", 0, id=f"t{number}") if isinstance(e, ToolBegin) else e for e in one]
    events += [ConverseStop("tool_use"), ConverseUsage(5, 2, 1, 30, 0)]
    asking = replace(work(stop=("\n\n\n",)), tools=(STOCK,), parallel_tool_calls=not single)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(events)), max_size=8)))
    whole, one_by_one = (
        read(events, [], asking),
        read(events, cuts, asking),
    )
    answers = [folded(CollectedAnswer(*each)) for each in (whole, one_by_one)]
    assert len({(a.text(), a.reasoning(), a.tool_calls()) for a in answers}) == 1
    assert (
        whole[1] == one_by_one[1] and whole[1].usage.input_tokens == 8 and whole[1].usage.cached_tokens == 2
    )
    assert "".join(e.text for e in events if type(e) is Delta) == answers[0].text()
