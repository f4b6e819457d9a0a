from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from budgeting.values import Plan, SectionCounts, ToolChoice, ToolChoiceMode
from gateway.contracts import native_answer, openai_answer
from gateway.contracts.answer import Fallback
from gateway.contracts.dialect import Frames, ParsedRequest
from gateway.contracts.events import Delta
from gateway.contracts.messages.answer import message_usage
from gateway.contracts.native_answer import NativeFrames
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.responses import answer as responses_answer
from gateway.contracts.values import Caller, CallerRole, Contract, FinishReason, GenerateRequest, Usage
from gateway.errors import PublicError
from gateway.testing import answer_for

REQUEST = GenerateRequest(
    request_id="req_1",
    generation_id="gen_1",
    contract=Contract.CHAT,
    caller=Caller("acme", CallerRole.CALLER, "key_1"),
    arrived_at=0.0,
    created=1_800_000_000,
    model="demo",
    trace_id="a" * 32,
)
HEAD = b'data: {"id":"chatcmpl-gen_1","object":"chat.completion.chunk","created":1800000000,"model":"demo",'
ERROR = PublicError(503, "backend_unavailable", "engine gone", retry_after_ms=1500)


def frames(kind: str, *, include_usage: bool = False) -> Frames:
    if kind == "native":
        return NativeFrames()
    dialect = OpenAIDialect(chat=kind == "chat")
    return dialect.frames(ParsedRequest(REQUEST, include_usage))


def events(data: bytes) -> list[Any]:
    assert data.endswith(b"\n\n")
    lines = data[:-2].split(b"\n\n")
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    return [line[6:] if line == b"data: [DONE]" else json.loads(line[6:]) for line in lines]


def test_a_native_token_is_one_event() -> None:
    assert (
        frames("native").delta(Delta('a"é\n', 1)) == 'data: {"type":"token","delta":"a\\"é\\n"}\n\n'.encode()
    )


def test_a_native_stream_ends_with_the_answer_less_its_text() -> None:
    (done,) = events(frames("native").finish(answer_for(REQUEST, "whole text")))
    assert done == {
        "type": "done",
        "request_id": "req_1",
        "backend": "embedded",
        "backend_version": "demo+none",
        "trace_id": "a" * 32,
        "finish_reason": "stop",
        "usage": {"input_tokens": 842, "output_tokens": 137, "cached_tokens": 640},
        "timings": {"queue_wait_ms": 3.1, "ttft_ms": 88.0, "total_ms": 912.4},
        "fallback": None,
        "budget": {
            "system": 212,
            "retrieval": 380,
            "recent_turns": 250,
            "older_summary": 0,
            "generation_reserve": 696,
            "dropped_chunks": [],
            "dropped_turns": 0,
        },
        "warnings": [],
    }


def test_a_broken_native_stream_ends_with_the_error() -> None:
    assert frames("native").fail(ERROR, "req_1") == (
        b'data: {"type":"error","error":{"code":"backend_unavailable","message":"engine gone","param":null,'
        b'"request_id":"req_1","retry_after_ms":1500},"partial":true}\n\n'
    )


def test_a_chat_stream_is_these_bytes() -> None:
    chat = frames("chat")
    assert chat.opening == (
        HEAD + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert (
        chat.delta(Delta("日本", 1))
        == HEAD
        + (
            '"choices":[{"index":0,"delta":{"content":"日本"},"logprobs":null,"finish_reason":null}]}\n\n'
        ).encode()
    )
    end = chat.finish(answer_for(REQUEST, "x"))
    start = b'"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"sluice":{'
    assert end.startswith(HEAD + start)
    assert end.endswith(b"}\n\ndata: [DONE]\n\n")


def test_a_completion_stream_is_these_bytes() -> None:
    completion = frames("completions")
    head = b'data: {"id":"cmpl-gen_1","object":"text_completion","created":1800000000,"model":"demo",'
    assert completion.opening == b""
    assert completion.delta(Delta("a", 1)) == (
        head + b'"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert completion.finish(answer_for(REQUEST, "x")).startswith(
        head
        + b'"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":null}],"sluice":{'
    )


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_asked_for_usage_comes_in_one_more_chunk_without_choices(kind: str) -> None:
    stream = frames(kind, include_usage=True)
    (delta,) = events(stream.delta(Delta("x", 1)))
    assert delta["usage"] is None
    closing, usage, done = events(stream.finish(answer_for(REQUEST, "x")))
    assert closing["choices"][0]["finish_reason"] == "stop"
    assert closing["usage"] is None
    assert "sluice" not in closing
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 842,
        "completion_tokens": 137,
        "total_tokens": 979,
        "prompt_tokens_details": {"cached_tokens": 640},
    }
    assert usage["sluice"]["trace_id"] == "a" * 32
    assert done == b"[DONE]"


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_each_chunk_has_the_usage_so_far_if_asked_for(kind: str) -> None:
    asked = ParsedRequest(REQUEST, include_usage=True, running_usage=True)
    plan = Plan((), tuple(range(12)), SectionCounts(recent_turns=12), 8, 0)
    stream = OpenAIDialect(chat=kind == "chat").frames(asked, "demo", plan, 8)
    sent = stream.opening + stream.delta(Delta("x", 1)) + stream.delta(Delta("", 2))
    *running, closing, last, _ = events(sent + stream.finish(answer_for(REQUEST, "x")))
    assert [one["usage"]["completion_tokens"] for one in running[-2:]] == [1, 3]
    assert {one["usage"]["prompt_tokens"] for one in running} == {12}
    assert running[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert closing["usage"] == last["usage"] and last["usage"]["completion_tokens"] == 137


def test_every_contract_has_the_tokens_that_were_written_to_a_cache() -> None:
    used = Usage(10, 1, 2, cache_write_tokens=3)
    assert openai_answer.usage_body(used)["prompt_tokens_details"] == {
        "cached_tokens": 2,
        "cache_write_tokens": 3,
    }
    assert native_answer.usage_body(used)["cache_write_tokens"] == 3
    assert responses_answer.usage_body(used)["input_tokens_details"]["cache_write_tokens"] == 3
    in_messages = message_usage(used)
    assert (in_messages["input_tokens"], in_messages["cache_creation_input_tokens"]) == (5, 3)


def test_every_contract_has_the_tokens_of_the_reasoning() -> None:
    used = Usage(10, 5, reasoning_tokens=4)
    assert openai_answer.usage_body(used)["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert native_answer.usage_body(used)["reasoning_tokens"] == 4
    assert responses_answer.usage_body(used)["output_tokens_details"]["reasoning_tokens"] == 4
    assert message_usage(used)["output_tokens_details"] == {"thinking_tokens": 4}
    assert "output_tokens_details" not in message_usage(Usage(10, 5))


def test_the_sluice_object_has_what_openais_fields_cannot_express() -> None:
    answer = answer_for(
        REQUEST,
        "x",
        finish_reason=FinishReason.DEADLINE,
        fallback=Fallback("bedrock", "queue_full", 2_000),
        warnings=("top_k was dropped",),
    )
    closing, _ = events(frames("chat").finish(answer))
    assert closing["choices"][0]["finish_reason"] == "length"
    assert closing["sluice"]["finish_reason"] == "deadline"
    assert closing["sluice"]["fallback"] == {
        "kind": "bedrock",
        "reason": "queue_full",
        "retry_after_ms": 2_000,
    }
    assert closing["sluice"]["warnings"] == ["top_k was dropped"]


def test_every_finish_reason_has_one_of_openais() -> None:
    for reason in FinishReason:
        closing, _ = events(frames("chat").finish(answer_for(REQUEST, "x", finish_reason=reason)))
        assert closing["choices"][0]["finish_reason"] in {"stop", "length", "tool_calls", "content_filter"}


def test_a_call_of_a_named_tool_ends_with_stop() -> None:
    named = structs.replace(REQUEST, tool_choice=ToolChoice(ToolChoiceMode.NAMED, "stock"))
    dialect, answer = OpenAIDialect(chat=True), answer_for(REQUEST, "", finish_reason=FinishReason.TOOL_CALLS)
    for request, reason in ((REQUEST, "tool_calls"), (named, "stop")):
        closing, _ = events(dialect.frames(ParsedRequest(request)).finish(answer))
        [whole] = json.loads(dialect.whole(ParsedRequest(request), answer))["choices"]
        assert closing["choices"][0]["finish_reason"] == whole["finish_reason"] == reason


def test_a_broken_chat_stream_ends_with_openais_error_and_is_not_done() -> None:
    assert frames("chat").fail(ERROR, "req_1") == (
        b'data: {"error":{"message":"engine gone","type":"service_unavailable_error","param":null,'
        b'"code":"backend_unavailable","sluice_code":"backend_unavailable"}}\n\n'
    )


@given(st.lists(st.text(min_size=1), max_size=5), st.sampled_from(["native", "chat", "completions"]))
def test_the_deltas_joined_are_the_text_whatever_it_holds(pieces: list[str], kind: str) -> None:
    stream = frames(kind)
    got = []
    for piece in pieces:
        (event,) = events(stream.delta(Delta(piece, 1)))
        if kind == "native":
            got.append(event["delta"])
        else:
            choice = event["choices"][0]
            got.append(choice["delta"]["content"] if kind == "chat" else choice["text"])
    assert got == pieces


def test_each_chunk_has_the_ids_of_its_tokens_where_they_are_asked_for() -> None:
    chunks = OpenAIDialect(chat=True).frames(ParsedRequest(REQUEST, token_ids=True))
    plain = OpenAIDialect(chat=True).frames(ParsedRequest(REQUEST))
    (event,) = events(chunks.delta(Delta("a", 1, token_ids=(5, 6))))
    assert event["choices"][0]["delta"] == {"content": "a"} and event["choices"][0]["token_ids"] == [5, 6]
    (event,) = events(plain.delta(Delta("a", 1, token_ids=(5, 6))))
    assert "token_ids" not in event["choices"][0]
