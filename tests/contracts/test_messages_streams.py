"""Anthropic's stream: its events add up to the whole answer, in the order that its clients require."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from msgspec.structs import replace

from budgeting.errors import ContextTooLong
from budgeting.values import Plan, PromptSection, SectionCounts
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.events import Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.messages.stream import MessagesDialect
from gateway.contracts.openai_answer import sent_status
from gateway.contracts.values import Contract, FinishReason, Sampling, Usage
from gateway.errors import PublicError, public_error
from gateway.testing import answer_for
from tests.answer_events import EventSequence, answers
from tests.contracts.test_event_writers import whole
from tests.contracts.test_stream_frames import REQUEST
from tests.message_events import accumulated, check_grammar, parsed

DIALECT = MessagesDialect()
ASKED = ParsedRequest(REQUEST)
PLAN = Plan((), (1, 2, 3), SectionCounts(recent_turns=3), 8, 0)
LOOK = (ToolBegin("look", 1, id="call_1"), ToolArgs('{"a": [1', 1), ToolArgs("]}", 1), ToolEnd("", 0))
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def stream(sequence: EventSequence) -> list[dict[str, Any]]:
    frames = DIALECT.frames(ASKED, "demo", PLAN)
    pieces = [frames.delta(one) if type(one) is Delta else frames.event(one) for one in sequence.events]
    return parsed(frames.opening + b"".join(pieces) + frames.finish(whole(sequence)))


@pytest.mark.slow
@given(answers(max_choices=1))
@example(EventSequence((Delta("\n\n", 1), *LOOK), (FinishReason.TOOL_CALLS,)))
@example(EventSequence((Delta("a", 1), *LOOK, Delta(" ", 1), Reasoning("b", 1), Delta("c", 1)), (STOP,)))
@example(EventSequence((Delta("a", 1), *LOOK[:2]), (LENGTH,)))
@example(EventSequence((), (STOP,)))
def test_the_official_client_adds_every_stream_up_to_the_whole_answer(sequence: EventSequence) -> None:
    events = stream(sequence)
    check_grammar(events)
    streamed = accumulated(events).to_dict()
    body: Any = json.loads(DIALECT.whole(ASKED, whole(sequence)))
    for field in ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence"):
        assert streamed[field] == body[field]
    assert {name: streamed["usage"][name] for name in body["usage"]} == body["usage"]  # type: ignore[index]


def test_the_frames_of_a_text_are_anthropics() -> None:
    sequence = EventSequence((Delta("Hé", 1), Delta("!", 1)), (STOP,))
    start, *middle, last, stop = stream(sequence)
    assert start["message"]["usage"]["input_tokens"] == 3
    assert middle == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hé"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "!"}},
        {"type": "content_block_stop", "index": 0},
    ]
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"] == {
        "input_tokens": 202,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 640,
        "output_tokens": 137,
    }
    assert last["sluice"]["finish_reason"] == "stop"
    assert stop == {"type": "message_stop"}


def test_thinking_has_a_signature_streamed_and_whole() -> None:
    sequence = EventSequence((Reasoning("Hm.", 1), Delta("Hi", 1)), (STOP,))
    content = json.loads(DIALECT.whole(ASKED, whole(sequence)))["content"]
    assert content[0]["signature"]
    assert content == [
        {"type": "thinking", "thinking": "Hm.", "signature": content[0]["signature"]},
        {"type": "text", "text": "Hi"},
    ]
    streamed = accumulated(stream(sequence)).content[0]
    assert streamed.type == "thinking"
    assert streamed.signature == content[0]["signature"]


@pytest.mark.parametrize(
    ("reason", "reserve", "said"),
    [
        (FinishReason.STOP, 10, "end_turn"),
        (FinishReason.TOOL_CALLS, 10, "tool_use"),
        (FinishReason.CONTENT_FILTER, 10, "refusal"),
        (FinishReason.LENGTH, 10, "max_tokens"),
        (FinishReason.LENGTH, 9, "model_context_window_exceeded"),
        (FinishReason.DEADLINE, 9, "max_tokens"),
        (FinishReason.ERROR, 10, "max_tokens"),
    ],
)
def test_each_finish_reason_has_its_stop_reason(reason: FinishReason, reserve: int, said: str) -> None:
    asked = ParsedRequest(replace(REQUEST, sampling=Sampling(max_tokens=10)))
    plain = answer_for(asked.request, "x", finish_reason=reason, usage=Usage(1, 1))
    budget = type(plain.budget)(0, 0, 1, 0, reserve, (), 0)
    assert json.loads(DIALECT.whole(asked, replace(plain, budget=budget)))["stop_reason"] == said


def test_a_context_that_the_backend_found_full_is_no_limit_of_the_caller() -> None:
    asked = ParsedRequest(replace(REQUEST, sampling=Sampling(max_tokens=10, stop=("x",))))
    plain = answer_for(asked.request, "x", finish_reason=FinishReason.LENGTH, usage=Usage(1, 1))
    answer = replace(plain, budget=type(plain.budget)(0, 0, 1, 0, 10, (), 0), context_full=True)
    assert json.loads(DIALECT.whole(asked, answer))["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(("tokens", "said"), [(8, "max_tokens"), (9, "model_context_window_exceeded")])
def test_a_call_that_a_stop_sequence_cuts_has_not_filled_the_context(tokens: int, said: str) -> None:
    asked = ParsedRequest(replace(REQUEST, sampling=Sampling(max_tokens=10, stop=("x",))))
    plain = answer_for(asked.request, "", finish_reason=FinishReason.LENGTH, usage=Usage(1, tokens))
    budget = type(plain.budget)(0, 0, 1, 0, 9, (), 0)
    assert json.loads(DIALECT.whole(asked, replace(plain, budget=budget)))["stop_reason"] == said


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("", {}),
        ('{"a": "b', {"a": "b"}),
        ('{"a": 18446744073709551616}', {"a": 2**64}),
        ('{"a": [18446744073709551616, ', {"a": [2**64]}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ("[[[", {"arguments": "[[["}),
        ("[1]", {"arguments": "[1]"}),
        ("nonsense", {"arguments": "nonsense"}),
    ],
)
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str, given: object) -> None:
    pieces = (ToolArgs(arguments, 1),) if arguments else ()
    call = (Delta("\n", 1), ToolBegin("look", 1, id="call_1"), *pieces, ToolEnd("", 0))
    body = json.loads(DIALECT.whole(ASKED, whole(EventSequence(call, (FinishReason.TOOL_CALLS,)))))
    assert body["content"] == [
        {"type": "tool_use", "id": "toolu_sluice_call_1", "name": "look", "input": given}
    ]


@pytest.mark.parametrize(
    ("status", "code", "sent", "kind"),
    [
        (400, "invalid_json", 400, "invalid_request_error"),
        (401, "invalid_key", 401, "authentication_error"),
        (403, "forbidden", 403, "permission_error"),
        (404, "unknown_model", 404, "not_found_error"),
        (409, "duplicate_request", 409, "invalid_request_error"),
        (413, "body_too_large", 413, "request_too_large"),
        (422, "invalid_request", 400, "invalid_request_error"),
        (429, "rate_limited", 429, "rate_limit_error"),
        (500, "internal", 500, "api_error"),
        (503, "queue_full", 529, "overloaded_error"),
        (504, "deadline_exceeded", 504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, code: str, sent: int, kind: str) -> None:
    error = PublicError(status, code, "no", "model")
    found, body = DIALECT.error(error, "req_1")
    assert found == sent == sent_status(error, Contract.MESSAGES)  # which the log line has
    assert json.loads(body) == {
        "type": "error",
        "error": {"type": kind, "message": "no", "param": "model", "sluice_code": code},
        "request_id": "req_1",
    }


def test_the_error_of_a_too_long_prompt_has_the_words_that_clients_know() -> None:
    _, body = DIALECT.error(PublicError(422, "context_too_long", "9 tokens", "messages"), "req_1")
    assert json.loads(body)["error"]["message"] == "prompt is too long: 9 tokens"


def test_claude_code_can_read_how_much_of_a_too_long_prompt_it_must_drop() -> None:
    refused = ContextTooLong(section=PromptSection.RECENT_TURNS, needed=9_000, allowed=4_000, reserve=96)
    _, body = DIALECT.error(public_error(refused), "req_1")
    message = json.loads(body)["error"]["message"]
    found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message)  # as it does
    assert found is not None and found.groups() == ("9000", "4000")


def test_a_broken_stream_ends_with_an_error_event() -> None:
    frames = DIALECT.frames(ASKED)
    [last] = parsed(frames.fail(PublicError(503, "backend_unavailable", "gone"), "req_1"))
    assert (last["type"], last["error"]["type"], last["request_id"]) == ("error", "overloaded_error", "req_1")
