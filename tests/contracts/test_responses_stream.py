"""The stream of a response is accepted by the official client's accumulator and by a check of its events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from msgspec import structs
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from budgeting.values import ToolKind
from gateway.contracts.events import Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.responses.request import ResponsesRequest
from gateway.contracts.responses.stream import ResponsesDialect
from gateway.contracts.values import FinishReason, TokenLogprob
from gateway.errors import BackendUnavailable, PublicError, public_error
from gateway.testing import answer_for
from tests.answer_events import EventSequence, answers
from tests.contracts.responses_language import check
from tests.contracts.test_event_writers import whole
from tests.contracts.test_responses_requests import parsed
from tests.contracts.test_stream_frames import REQUEST

RESPONSES = ResponsesDialect()
ASKED = structs.replace(parsed({"model": "demo", "input": "hi"}), request=REQUEST)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def written(sequence: EventSequence, asked: ResponsesRequest = ASKED) -> list[dict[str, Any]]:
    frames = RESPONSES.frames(asked, "demo")
    pieces = [frames.delta(one) if type(one) is Delta else frames.event(one) for one in sequence.events]
    return events(frames.opening + b"".join(pieces) + frames.finish(whole(sequence)))


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        kind, body = block.split("\n")
        found.append(json.loads(body.removeprefix("data: ")))
        assert found[-1]["type"] == kind.removeprefix("event: ")
    return found


@pytest.mark.slow
@given(answers(max_choices=1))
def test_every_stream_is_legal_and_adds_up_in_the_official_client(sequence: EventSequence) -> None:
    sent = written(sequence)
    check(sent)
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in sent:
        state.handle_event(EVENT.validate_python(event))
    final = sent[-1]["response"]
    body = json.loads(RESPONSES.whole(ASKED, whole(sequence)))
    assert final == body
    response = Response.model_validate(body)
    assert response.output_text == sequence.text()
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        (call.id, call.name, call.arguments) for call in sequence.tool_calls()
    ]
    reasoning: list[Any] = [item for item in response.output if item.type == "reasoning"]
    assert "".join(item.content[0].text for item in reasoning) == (sequence.reasoning() or "")
    expected = "incomplete" if sequence.reasons[0] is FinishReason.LENGTH else "completed"
    assert response.status == expected
    assert (response.incomplete_details is not None) == (expected == "incomplete")


def test_a_whole_response_has_each_text_with_its_logprobs_where_it_was_generated() -> None:
    call = (ToolBegin("stock", 1, id="call_1"), ToolArgs("{}", 1), ToolEnd("", 0))
    texts = [Delta(text, 1, logprobs=(TokenLogprob(text.encode(), -0.5),)) for text in ("Let me ", "Done")]
    sequence = EventSequence((texts[0], *call, Reasoning("Hm.", 1), texts[1]), (FinishReason.STOP,))
    output = json.loads(RESPONSES.whole(ASKED, whole(sequence)))["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "reasoning", "message"]
    for item, text in zip(output[::3], ("Let me ", "Done"), strict=True):
        [part] = item["content"]
        assert part["text"] == text
        assert [one["token"] for one in part["logprobs"]] == [text]


def test_tokens_with_log_probabilities_around_and_inside_a_call_are_no_message() -> None:
    silent = Delta("", 1, logprobs=(TokenLogprob(b"{", -0.5),))
    call = (ToolBegin("stock", 1, id="call_1"), silent, ToolArgs("{}", 1), silent, ToolEnd("", 0))
    sent = written(EventSequence((silent, *call, silent), (FinishReason.TOOL_CALLS,)))
    check(sent)
    assert [item["type"] for item in sent[-1]["response"]["output"]] == ["function_call"]


def test_a_background_response_is_queued_before_it_is_in_progress() -> None:
    asked = structs.replace(ASKED, background=True, echo={**ASKED.echo, "background": True})
    sent = written(EventSequence((Delta("Hi", 1),), (FinishReason.STOP,)), asked)
    check(sent)
    assert [(one["type"], one["response"]["status"]) for one in sent[:3]] == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]


def test_a_stream_without_text_has_the_empty_message_of_the_whole_response() -> None:
    frames, answer = RESPONSES.frames(ASKED, "demo"), answer_for(REQUEST, "")
    sent = events(frames.opening + frames.finish(answer))
    check(sent)
    [item] = sent[-1]["response"]["output"]
    assert [item] == json.loads(RESPONSES.whole(ASKED, answer))["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_an_answer_that_a_filter_has_cut_is_incomplete_for_that_reason() -> None:
    frames = RESPONSES.frames(ASKED, "demo")
    answer = answer_for(REQUEST, "x", finish_reason=FinishReason.CONTENT_FILTER)
    sent = events(frames.opening + frames.delta(Delta("x", 1, index=0)) + frames.finish(answer))
    for one in (sent[-1]["response"], json.loads(RESPONSES.whole(ASKED, answer))):
        assert (one["status"], one["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})


@pytest.mark.parametrize("count", range(7))
def test_a_broken_stream_ends_with_one_failure_wherever_it_broke(count: int) -> None:
    begun = [
        Reasoning("Hm.", 1),
        Delta("One ", 1),
        Delta("moment", 1),
        ToolBegin("stock", 1, id="call_1"),
        ToolArgs('{"a":', 1),
        ToolArgs("1}", 1),
        ToolEnd("", 0),
    ]
    frames = RESPONSES.frames(ASKED, "demo")
    pieces = [frames.delta(one) if type(one) is Delta else frames.event(one) for one in begun[: count + 1]]
    error = public_error(BackendUnavailable("the worker is gone"))
    sent = events(frames.opening + b"".join(pieces) + frames.fail(error, "req_1"))
    check(sent)
    assert sent[-1]["type"] == "response.failed"
    assert sent[-1]["response"]["error"]["code"] == "server_error"
    assert sum(event["type"] in ("response.failed", "response.completed") for event in sent) == 1


def test_the_error_of_a_too_long_context_has_openais_code() -> None:
    frames = RESPONSES.frames(ASKED, "demo")
    sent = events(frames.fail(PublicError(422, "context_too_long", "too long", "input"), "req_1"))
    error = sent[-1]["response"]["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == "This model's maximum context length is exceeded: too long"


@pytest.mark.parametrize(
    ("status", "code", "shown"),
    [
        (404, "unknown_model", "invalid_prompt"),
        (422, "invalid_request", "invalid_prompt"),
        (429, "rate_limited", "rate_limit_exceeded"),
        (429, "quota_exceeded", "insufficient_quota"),
        (503, "queue_full", "server_error"),
    ],
)
def test_a_failed_response_has_an_error_code_that_clients_know(status: int, code: str, shown: str) -> None:
    sent = events(RESPONSES.frames(ASKED, "demo").fail(PublicError(status, code, "no", "input"), "req_1"))
    assert sent[-1]["response"]["error"] == {"code": shown, "message": "no"}


@pytest.mark.parametrize("background", [True, False])
def test_a_broken_stream_says_whether_its_response_is_stored(background: bool) -> None:
    asked = structs.replace(ASKED, store=True, background=background, echo={"store": True})
    frames = RESPONSES.frames(asked, "demo")
    error = public_error(BackendUnavailable("the worker broke off"))
    [failed] = events(frames.opening + frames.fail(error, "req_1"))[-1:]
    assert failed["response"]["store"] is background


def test_a_namespaces_member_and_a_custom_tool_have_their_own_names_and_raw_text() -> None:
    asked = ResponsesRequest(REQUEST, namespaces={"shop__stock": ("shop", "stock")})
    frames = RESPONSES.frames(asked, "demo")
    pieces = (
        ToolBegin("shop__stock", 1, id="call_1"),
        ToolArgs("{}", 1),
        ToolEnd("", 0),
        ToolBegin("apply_patch", 1, id="call_2", call=1, kind=ToolKind.CUSTOM),
        ToolArgs("*** Begin", 1, call=1),
        ToolArgs(" Patch", 1, call=1),
        ToolEnd("", 0, call=1),
    )
    answer = answer_for(REQUEST, "", finish_reason=FinishReason.TOOL_CALLS)
    sent = events(frames.opening + b"".join(frames.event(one) for one in pieces) + frames.finish(answer))
    check(sent)
    member, patch = sent[-1]["response"]["output"]
    assert (member["namespace"], member["name"], member["arguments"]) == ("shop", "stock", "{}")
    assert (patch["type"], patch["input"]) == ("custom_tool_call", "*** Begin Patch")
    deltas = [event["delta"] for event in sent if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["*** Begin", " Patch"]


def test_a_function_call_whose_arguments_are_cut_is_incomplete() -> None:
    frames = RESPONSES.frames(ASKED, "demo")
    pieces = (ToolBegin("stock", 1, id="call_1"), ToolArgs('{"a', 1), ToolEnd("", 0))
    answer = answer_for(REQUEST, "", finish_reason=FinishReason.LENGTH)
    sent = events(frames.opening + b"".join(frames.event(one) for one in pieces) + frames.finish(answer))
    [done] = [event for event in sent if event["type"] == "response.output_item.done"]
    assert (done["item"]["status"], done["item"]["arguments"]) == ("incomplete", '{"a')
    assert sent[-1]["response"]["output"] == [done["item"]]
