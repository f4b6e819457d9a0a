"""Reasoning and tool calls in every contract: the events of a stream add up to the whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from budgeting.values import ToolCall, ToolKind
from gateway.contracts.answer import Answer, Choice
from gateway.contracts.dialect import Frames, ParsedRequest
from gateway.contracts.events import Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.native_answer import NativeDialect
from gateway.contracts.openai_answer import REASONING_FIELDS
from gateway.contracts.openai_stream import ChunkFrames, OpenAIDialect
from gateway.contracts.values import FinishReason
from gateway.testing import answer_for
from tests.answer_events import EventSequence, answers
from tests.contracts.test_openai_requests import ORIGIN
from tests.contracts.test_stream_frames import REQUEST, events

ASKED = ParsedRequest(REQUEST)
CHAT, TEXT, NATIVE = OpenAIDialect(chat=True), OpenAIDialect(chat=False), NativeDialect()
CALL = (ToolBegin("stock", 1, id="call_1"), ToolArgs('{"a":', 1), ToolArgs("1}", 1), ToolEnd("", 0))


def whole(sequence: EventSequence) -> Answer:
    """The answer that the gateway builds from the events."""
    first, *others = [
        Choice(sequence.text(index), reason, None, sequence.reasoning(index), sequence.tool_calls(index))
        for index, reason in enumerate(sequence.reasons)
    ]
    return answer_for(
        REQUEST,
        first.text,
        finish_reason=first.finish_reason,
        reasoning=first.reasoning,
        tool_calls=first.tool_calls,
        others=tuple(others),
        events=sequence.in_order(),
    )


def written(frames: Frames, sequence: EventSequence) -> list[Any]:
    """The parsed events of the stream that the caller receives, without ``[DONE]``."""
    pieces = [frames.delta(one) if type(one) is Delta else frames.event(one) for one in sequence.events]
    data = frames.opening + b"".join(pieces) + frames.finish(whole(sequence))
    return [one for one in events(data) if isinstance(one, dict)]


@given(answers())
def test_the_official_client_adds_every_chat_stream_up_to_the_whole_answer(sequence: EventSequence) -> None:
    state = ChatCompletionStreamState()
    for chunk in written(CHAT.frames(ASKED), sequence):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    streamed = state.current_completion_snapshot
    expected = ChatCompletion.model_validate_json(CHAT.whole(ASKED, whole(sequence)))
    assert len(streamed.choices) == len(expected.choices)
    for mine, theirs in zip(streamed.choices, expected.choices, strict=True):
        assert (mine.message.content or None) == (theirs.message.content or None)
        assert getattr(mine.message, "reasoning", None) == getattr(theirs.message, "reasoning", None)
        assert mine.finish_reason == theirs.finish_reason
        calls: list[Any] = [call.to_dict() for call in mine.message.tool_calls or ()]
        assert [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls] == [
            (one.id, one.function.name, one.function.arguments)
            for one in theirs.message.tool_calls or ()
            if one.type == "function"
        ]
        assert [call["index"] for call in calls] == list(range(len(calls)))


@given(answers())
def test_the_order_of_a_chat_stream_is_openais(sequence: EventSequence) -> None:
    named: set[tuple[int, int]] = set()
    for number, chunk in enumerate(written(CHAT.frames(ASKED), sequence)):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            assert ("role" in delta) == (number == 0 or delta == {"role": "assistant", "content": ""})
            for call in delta.get("tool_calls", ()):
                key = choice["index"], call["index"]
                if "id" in call:
                    assert key not in named
                    assert call["type"] == "function"
                    assert call["function"]["name"]
                    assert call["function"]["arguments"] == ""
                    named.add(key)
                else:
                    assert key in named
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    assert call["function"]["arguments"]


@given(answers(max_choices=1))
def test_a_native_stream_adds_up_to_the_whole_answer(sequence: EventSequence) -> None:
    text, reasoning, calls, open_call = "", "", [], None
    for event in written(NATIVE.frames(ASKED), sequence):
        match event["type"]:
            case "token":
                text += event["delta"]
            case "reasoning":
                reasoning += event["delta"]
            case "tool_begin":
                assert event["index"] == len(calls)
                assert open_call is None
                open_call = {"id": event["id"], "name": event["name"], "arguments": ""}
                calls.append(open_call)
            case "tool_args":
                assert open_call is calls[event["index"]]
                open_call["arguments"] += event["delta"]
            case "tool_end":
                assert open_call is calls[event["index"]]
                open_call = None
            case other:
                assert other == "done"
    body = json.loads(NATIVE.whole(ASKED, whole(sequence)))
    assert (text, reasoning) == (body["output_text"], body.get("reasoning", ""))
    assert calls == body.get("tool_calls", [])


@given(answers())
def test_a_text_completion_has_the_text_alone(sequence: EventSequence) -> None:
    texts = [""] * len(sequence.reasons)
    for chunk in written(TEXT.frames(ASKED), sequence):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            assert choice["finish_reason"] in {None, "stop", "length"}
    body = json.loads(TEXT.whole(ASKED, whole(sequence)))
    assert texts == [choice["text"] for choice in body["choices"]]
    assert {choice["finish_reason"] for choice in body["choices"]} <= {"stop", "length"}


@pytest.mark.parametrize("fields", [("reasoning",), ("reasoning_content",), REASONING_FIELDS])
def test_the_reasoning_is_in_the_fields_that_the_setting_names(fields: tuple[Any, ...]) -> None:
    dialect = OpenAIDialect(chat=True, reasoning_fields=fields)
    [chunk] = events(dialect.frames(ASKED).event(Reasoning("Hm.", 1)))
    assert chunk["choices"][0]["delta"] == dict.fromkeys(fields, "Hm.")
    message = json.loads(dialect.whole(ASKED, answer_for(REQUEST, "x", reasoning="Hm.")))["choices"][0][
        "message"
    ]
    assert {name: message[name] for name in message if name.startswith("reasoning")} == dict.fromkeys(
        fields, "Hm."
    )


def test_a_chat_without_include_reasoning_has_only_the_answer() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "include_reasoning": False}
    asked = CHAT.parse(json.dumps(body).encode(), ORIGIN)
    assert CHAT.frames(asked).event(Reasoning("Hm.", 1)) == b""
    message = json.loads(CHAT.whole(asked, answer_for(REQUEST, "x", reasoning="Hm.")))["choices"][0][
        "message"
    ]
    assert message == {"role": "assistant", "content": "x", "refusal": None}


def test_a_call_without_text_has_no_content() -> None:
    calls = (ToolCall("call_1", "stock", "{}"),)
    answer = answer_for(REQUEST, "", finish_reason=FinishReason.TOOL_CALLS, tool_calls=calls)
    [choice] = json.loads(CHAT.whole(ASKED, answer))["choices"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_plain_answers_have_no_new_fields() -> None:
    message = json.loads(CHAT.whole(ASKED, answer_for(REQUEST, "x")))["choices"][0]["message"]
    assert set(message) == {"role", "content", "refusal"}
    body = json.loads(NATIVE.whole(ASKED, answer_for(REQUEST, "x")))
    assert not {"reasoning", "tool_calls"} & set(body)
    assert set(body["usage"]) == {"input_tokens", "output_tokens", "cached_tokens"}


def test_a_custom_tool_has_an_input_in_stream_and_whole() -> None:
    frames = CHAT.frames(ASKED)
    begin = ToolBegin("code", 1, id="call_1", kind=ToolKind.CUSTOM)
    sent = events(frames.event(begin) + frames.event(ToolArgs("print()", 1)))
    first, second = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in sent]
    assert first == {"index": 0, "id": "call_1", "type": "custom", "custom": {"name": "code", "input": ""}}
    assert second == {"index": 0, "custom": {"input": "print()"}}
    calls = (ToolCall("call_1", "code", "print()", ToolKind.CUSTOM),)
    answer = answer_for(REQUEST, "", finish_reason=FinishReason.TOOL_CALLS, tool_calls=calls)
    [choice] = json.loads(CHAT.whole(ASKED, answer))["choices"]
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "custom", "custom": {"name": "code", "input": "print()"}}
    ]


def test_requested_token_ids_come_with_every_event() -> None:
    frames = CHAT.frames(ParsedRequest(REQUEST, token_ids=True))
    assert isinstance(frames, ChunkFrames)
    sent = [frames.event(type(one)(**{**_fields(one), "token_ids": (7,)})) for one in CALL]
    assert [chunk["choices"][0]["token_ids"] for data in sent for chunk in events(data)] == [[7]] * 4


def _fields(one: Delta) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def test_reasoning_tokens_are_a_part_of_the_answers() -> None:
    answer = answer_for(REQUEST, "x")
    usage = type(answer.usage)(10, 8, 0, 5)
    body = json.loads(CHAT.whole(ASKED, answer_for(REQUEST, "x", usage=usage)))
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert (
        json.loads(NATIVE.whole(ASKED, answer_for(REQUEST, "x", usage=usage)))["usage"]["reasoning_tokens"]
        == 5
    )
