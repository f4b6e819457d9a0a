"""What is sent to a worker, and how its answer is read: every field, every way to cut the bytes."""

from __future__ import annotations

import json
import time
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from adapters.values import Adapter
from budgeting.token_ids import PieceIds
from budgeting.values import Tool
from gateway.backends.port import PartialAnswer
from gateway.backends.workers.answer import CompletionReader
from gateway.backends.workers.dialect import FEATURES, CompletionWriter, Dialect, salt_of
from gateway.backends.workers.errors import (
    BadHttp,
    ConnectFailed,
    ConnectionLost,
    ConnectionsInUse,
    TimedOut,
    TransportError,
)
from gateway.backends.workers.refusal import failure_of, failure_of_transport
from gateway.contracts.events import Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.features import KNOWN_FEATURES, TOOL_FEATURES, VLLM_FEATURES, Feature
from gateway.contracts.formats import FormatBody, from_format
from gateway.contracts.sse import MAX_EVENT_BYTES, EventReader, EventTooLarge
from gateway.contracts.values import FinishReason, FormatType, ResponseFormat, Sampling, Usage
from resilience.failures import BackendFailure, FailureKind
from tests.workers.raw_worker import DONE, ending, event, make_writer, piece, token_bytes, usage, work

payloads = st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"]))


@settings(deadline=None)
@given(
    st.lists(st.lists(payloads, min_size=1, max_size=3), max_size=6),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
    st.data(),
)
def test_events_are_the_same_however_the_bytes_are_cut(
    events: list[list[str]], newline: str, comments: bool, data: Any
) -> None:
    text = ""
    for lines in events:
        text += f": a comment{newline}event: message{newline}" if comments else ""
        text += "".join(f"data: {line}{newline}" for line in lines) + newline
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader, read = EventReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        read += reader.feed(raw[start:end])
    read += reader.feed(b"\n" if newline == "\r" else b"")  # a lone CR at the end waits for what follows
    assert read == ["\n".join(lines).encode() for lines in events]


def test_a_field_without_a_space_and_unknown_fields_are_read_as_the_standard_says() -> None:
    assert EventReader().feed(b"id: 7\ndata:x\nretry: 3\n\ndata\n\n") == [b"x"]


@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_an_event_without_an_end_is_bounded(newline: bytes) -> None:
    reader = EventReader()
    with pytest.raises(EventTooLarge, match="longer than"):
        for _ in range(MAX_EVENT_BYTES // 1000 + 2):
            reader.feed(b"data: " + b"x" * 1000 + newline)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_an_event_of_very_many_empty_lines_is_read_at_once_and_bounded(newline: bytes) -> None:
    reader, lines, began = EventReader(), 100_000, time.perf_counter()
    assert reader.feed((b"data:" + newline) * lines + newline) == [b"\n" * (lines - 1)]
    with pytest.raises(EventTooLarge, match="longer than"):
        for _ in range(MAX_EVENT_BYTES // lines + 1):
            reader.feed((b"data:" + newline) * lines)
    assert time.perf_counter() - began < 10


def sent(writer: CompletionWriter, **changes: Any) -> dict[str, Any]:
    return json.loads(writer.write(work(**changes)).body)  # type: ignore[no-any-return]


def test_fields_that_sluice_does_not_know_are_written_and_replace_none_of_its_own() -> None:
    body = sent(make_writer("base"), extra={"frobnicate": [1], "model": "other", "stream": False})
    assert (body["frobnicate"], body["model"], body["stream"]) == ([1], "base", True)


def test_a_plain_request_asks_for_a_stream_with_usage_and_nothing_that_was_not_asked() -> None:
    assert sent(make_writer("base"), cache_salt=None) == {
        "model": "base",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


FULL = Sampling(
    max_tokens=9,
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    seed=-3,
    stop=("END",),
    n=2,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.2,
    logit_bias=MappingProxyType({17: -100.0}),
    logprobs=2,
)


def test_every_sampling_field_is_sent_under_its_name() -> None:
    body = sent(make_writer("base"), **{}, sampling={f: getattr(FULL, f) for f in FULL.__slots__})
    assert {k: body[k] for k in body.keys() - {"messages", "stream", "stream_options", "model"}} == {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -3,
        "stop": ["END"], "n": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.2, "logit_bias": {"17": -100.0}, "logprobs": True, "top_logprobs": 2,
        "return_tokens_as_token_ids": True, "return_token_ids": True, "cache_salt": salt_of("acme"),
    }  # fmt: skip


def test_token_ids_go_to_completions_and_so_does_a_raw_prompt() -> None:
    writer = make_writer("base", token_ids=True)
    assert writer.path(work()) == "/completions"
    assert sent(writer, ids=[1, 2, 3])["prompt"] == [1, 2, 3]
    raw = work(ids=[4, 5], messages=())
    assert make_writer("base").path(raw) == "/completions"
    assert json.loads(make_writer("base").write(raw).body)["prompt"] == [4, 5]
    assert sent(writer, sampling={"logprobs": 0})["logprobs"] == 0


def test_token_ids_in_pieces_are_sent_as_one_list() -> None:
    writer, ids = make_writer("base", token_ids=True), PieceIds([(1, 2), (), (3,)], 3)
    for _ in range(2):  # the second time from the cache
        assert sent(writer, token_ids=ids)["prompt"] == [1, 2, 3]
    partial = PartialAnswer("x", (4, 5))
    assert sent(writer, token_ids=ids, partial=partial)["prompt"] == [1, 2, 3, 4, 5]
    assert sent(writer, token_ids=PieceIds([], 0))["prompt"] == []
    assert sent(writer, token_ids=ids, extra={"prompt": "another"})["prompt"] == [1, 2, 3]


@pytest.mark.parametrize("cut", [0, 40, 500])
@pytest.mark.parametrize("place", ["choice", "chunk", "none"])
def test_the_prompts_ids_that_vllm_repeats_are_no_part_of_the_answer(place: str, cut: int) -> None:
    text = 'a "prompt_token_ids":[1] is text'
    first: dict[str, Any] = {"index": 0, "text": text, "token_ids": [7, 8]}
    sent: dict[str, Any] = {"choices": [first]}
    if place != "none":
        (first if place == "choice" else sent)["prompt_token_ids"] = list(range(2_000))
    reader = CompletionReader(work(), token_bytes)
    event = b"data: " + json.dumps(sent, separators=(",", ":")).encode() + b"\n\n"
    (delta,) = [*(reader.feed(event[:cut]) if cut else ()), *reader.feed(event[cut:])]
    assert (delta.text, delta.token_ids, reader.fault) == (text, (7, 8), None)


def test_an_adapter_is_sent_as_the_model_by_its_id_or_its_name_at_the_worker() -> None:
    adapter = Adapter("manga_v3", 1, "base", "/a")
    assert sent(make_writer("base"), adapter=adapter)["model"] == "manga_v3"
    names = MappingProxyType({"manga_v3": "lora-7"})
    assert sent(make_writer("base", adapters=dict(names)), adapter=adapter)["model"] == "lora-7"


def test_priority_is_sent_only_when_the_workers_take_it_and_in_their_direction() -> None:
    assert "priority" not in sent(make_writer("base"), priority=1)
    assert sent(make_writer("base", send_priority=True), priority=1)["priority"] == -1
    assert sent(make_writer("base", Dialect.SLUICE, send_priority=True), priority=1)["priority"] == 1


def test_another_sluice_gets_the_tenant_the_priority_and_the_deadline() -> None:
    writer = make_writer("base", Dialect.SLUICE)
    asked = work(
        tenant="acme",
        org="acme-group",
        user="u1",
        session_id="s1",
        priority=1,
        deadline=12.0,
        cache_salt="acme",
    )
    body = json.loads(writer.write(asked, now=10.5001).body)
    assert body["sluice"] == {"token_ids": True, "session_id": "s1", "deadline_ms": 1500}
    assert (body["user"], body["priority"]) == ("u1", 1)
    assert writer.headers(asked).decode().splitlines() == [
        "x-sluice-tenant: acme",
        "x-sluice-org: acme-group",
        f"x-sluice-cache-salt: {salt_of('acme')}",
    ]
    # A deadline that has passed or is far away is still a valid field.
    for now, deadline_ms in ((99.0, 1), (-1e9, 86_400_000)):
        assert json.loads(writer.write(asked, now=now).body)["sluice"]["deadline_ms"] == deadline_ms
    for dialect in (Dialect.VLLM, Dialect.OPENAI):
        other = make_writer("base", dialect)
        assert other.headers(asked) == b""
        assert not {"user", "sluice", "priority"} & set(json.loads(other.write(asked).body))


def test_a_tenant_that_no_header_may_hold_is_not_sent() -> None:
    sent_headers = make_writer("base", Dialect.SLUICE).headers(
        work(tenant="a\r\nx-evil: 1", org="", cache_salt="a")
    )
    assert sent_headers.decode().splitlines() == [f"x-sluice-cache-salt: {salt_of('a')}"]


def test_tenants_that_share_are_of_one_salt() -> None:
    shared = [
        make_writer("base", Dialect.SLUICE, share_prefix_across_tenants=True).headers(work(cache_salt=tenant))
        for tenant in ("acme", "umbra")
    ]
    assert shared[0] == shared[1] == b"x-sluice-cache-salt: shared\r\n"
    assert "cache_salt" not in sent(make_writer("base", share_prefix_across_tenants=True), cache_salt="acme")


def test_the_salt_is_no_tenant_name_and_goes_to_vllm_alone() -> None:
    salt = sent(make_writer("base"), cache_salt="A/very@secret\\tenant" * 20)["cache_salt"]
    assert len(salt) == 32 and salt.isalnum()
    assert salt != sent(make_writer("base"), cache_salt="other")["cache_salt"]
    for dialect in (Dialect.SLUICE, Dialect.OPENAI):
        assert "cache_salt" not in sent(make_writer("base", dialect))


def test_plain_openai_has_its_own_name_for_the_length() -> None:
    assert sent(make_writer("gpt", Dialect.OPENAI))["max_completion_tokens"] == 16


@pytest.mark.parametrize("dialect", [Dialect.OPENAI, Dialect.VLLM])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_limit_of_a_chat_goes_in_the_field_that_its_server_takes(dialect: Dialect, field: str) -> None:
    writer = make_writer("base", dialect, max_tokens_field=field)
    assert [name for name in sent(writer) if name.startswith("max_")] == [field]
    raw = sent(writer, messages=())
    assert raw["max_tokens"] == 16 and "max_completion_tokens" not in raw


def test_a_caller_who_does_not_stream_gets_his_tokens_in_larger_pieces_from_vllm() -> None:
    body = sent(make_writer("base"), stream=False)
    assert body["stream_interval"] == 32 and body["stream_options"]["continuous_usage_stats"] is True
    assert "stream_interval" not in sent(make_writer("base", Dialect.SLUICE), stream=False)


def test_an_answer_that_may_call_tools_comes_from_vllm_a_token_at_a_time() -> None:
    assert "stream_interval" not in sent(make_writer("base"), stream=False, tools=(Tool("stock"),))


def test_several_greedy_texts_are_asked_of_vllm_in_a_way_it_takes() -> None:
    body = sent(make_writer("base"), sampling={"n": 2, "temperature": 0.0})
    assert (body["temperature"], body["top_k"]) == (1.0, 1)
    assert (
        sent(make_writer("base", Dialect.SLUICE), sampling={"n": 2, "temperature": 0.0})["temperature"] == 0
    )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (ResponseFormat(FormatType.JSON_OBJECT), {"response_format": {"type": "json_object"}}),
        (
            ResponseFormat(FormatType.JSON_SCHEMA, '{"type": "object"}'),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        (ResponseFormat(FormatType.CHOICE, '["a", "b"]'), {"structured_outputs": {"choice": ["a", "b"]}}),
        (ResponseFormat(FormatType.REGEX, "[a-z]"), {"structured_outputs": {"regex": "[a-z]"}}),
        (ResponseFormat(FormatType.GRAMMAR, "start: x"), {"structured_outputs": {"grammar": "start: x"}}),
    ],
)
def test_shapes_are_asked_for_in_openais_field_where_it_has_one(
    shape: ResponseFormat, expected: dict[str, object]
) -> None:
    body = sent(make_writer("base"), response_format=shape)
    assert {k: v for k, v in body.items() if k in ("response_format", "structured_outputs")} == expected


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_worker_gets_the_strict_flag_of_the_callers_schema(strict: bool | None) -> None:
    wrapped = {"name": "record", "schema": {"type": "object"}, "strict": strict}
    shape = from_format(FormatBody(type="json_schema", json_schema=wrapped))
    schema = sent(make_writer("base", Dialect.OPENAI), response_format=shape)["response_format"][
        "json_schema"
    ]
    assert schema.get("strict") is strict and ("strict" in schema) is (strict is not None)


def test_plain_openai_declares_no_extension() -> None:
    lacking = {Feature.TOP_K, Feature.MIN_P, Feature.REPETITION_PENALTY, Feature.LORA}
    lacking |= {Feature.TEMPLATE_KWARGS} | VLLM_FEATURES
    assert FEATURES[Dialect.OPENAI] == (KNOWN_FEATURES | TOOL_FEATURES | {Feature.IMAGES}) - lacking


def read(*pieces: bytes, **changes: Any) -> tuple[list[Delta], CompletionReader]:
    reader, deltas = CompletionReader(work(**changes), token_bytes), []
    for one in pieces:
        deltas += reader.feed(one)
        if reader.fault is not None:
            raise reader.fault
    return deltas, reader


def test_the_chunks_of_one_read_are_one_delta() -> None:
    deltas, reader = read(piece("") + piece("Hel") + piece("lo") + ending("stop") + usage(8, 3, 6) + DONE)
    assert deltas == [Delta("Hello", 2)]
    rest, completion = reader.finish()
    assert rest == Delta("", 1), "a token without text, such as the one that ends it"
    assert (completion.usage.input_tokens, completion.usage.output_tokens) == (8, 3)
    assert completion.usage.cached_tokens == 6
    details = {"cached_tokens": 6, "cache_write_tokens": 2}
    counts = {"prompt_tokens": 8, "completion_tokens": 1, "prompt_tokens_details": details}
    _, reader = read(piece("Hi") + ending("stop") + event({"choices": [], "usage": counts}) + DONE)
    assert reader.finish()[1].usage == Usage(8, 1, 6, cache_write_tokens=2)
    assert reader.done


def test_a_chunk_without_text_is_no_delta_but_a_sign_of_life() -> None:
    deltas, reader = read(piece(""))
    assert deltas == [] and reader.started


def test_what_came_before_an_error_in_the_same_read_is_not_lost() -> None:
    reader = CompletionReader(work(), token_bytes)
    assert reader.feed(piece("Hel") + piece("lo") + event({"error": {"message": "x"}})) == [Delta("Hello", 2)]
    assert isinstance(reader.fault, BackendFailure)


def test_chunks_of_several_tokens_are_counted_by_the_running_usage() -> None:
    def chunk(text: str, count: int, index: int = 0) -> bytes:
        choice = {"index": index, "delta": {"content": text}, "finish_reason": None}
        return event({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": count}})

    reader = CompletionReader(work(sampling={"n": 2}), token_bytes, running_counts=True)
    deltas = (
        reader.feed(chunk("a", 1) + chunk("b", 1, 1))
        + reader.feed(chunk("bcd", 17))
        + reader.feed(chunk("e", 2, 1))
    )
    assert [(delta.index, delta.tokens) for delta in deltas] == [(0, 1), (1, 1), (0, 16), (1, 1)]
    reader.feed(ending("stop") + ending("stop", 1) + usage(1, 20))
    rest, completion = reader.finish()
    assert rest == Delta("", 1) and completion.usage.output_tokens == 20


def test_several_texts_and_their_finish_reasons_are_kept_apart() -> None:
    data = piece("a") + piece("b", 1) + piece("c") + ending("stop", 1) + ending("length") + usage(1, 3)
    deltas, reader = read(data, sampling={"n": 2})
    assert deltas == [Delta("ac", 2), Delta("b", 1, index=1)]
    completion = reader.finish()[1]
    assert (completion.finish_reason, completion.others) == (FinishReason.LENGTH, (FinishReason.STOP,))


def test_an_answer_with_a_text_that_has_not_ended_is_broken() -> None:
    for pieces in (
        [piece("a") + ending("stop") + piece("b", 1)],
        [piece("a"), piece("b", 1), ending("stop", 1)],
    ):
        _, reader = read(*pieces, sampling={"n": 2})
        with pytest.raises(ConnectionLost, match="ended before the answer"):
            reader.finish()


@pytest.mark.parametrize("reads", [[piece("a") + ending("stop") + DONE], [piece("a"), ending("stop"), DONE]])
def test_a_worker_that_gives_one_text_whatever_n_is_said_to_do_so_and_not_asked_again(
    reads: list[bytes],
) -> None:
    _, reader = read(*reads, sampling={"n": 2})
    with pytest.raises(BackendFailure, match="fewer texts than the n of 2") as caught:
        reader.finish()
    assert caught.value.param == "n" and not caught.value.policy.other_backend


def test_a_text_that_the_worker_aborted_is_a_failure_that_can_be_resumed() -> None:
    reader = CompletionReader(work(), token_bytes)
    assert reader.feed(piece("Hel") + ending("abort") + usage(1, 1)) == [Delta("Hel", 1)]
    with pytest.raises(BackendFailure) as caught:
        reader.finish()
    assert caught.value.kind is FailureKind.PREEMPTED and caught.value.policy.resumes


def test_without_usage_the_prompt_and_the_chunks_are_counted() -> None:
    _, reader = read(piece("a") + piece("b") + ending("stop"), ids=[1, 2, 3])
    rest, completion = reader.finish()
    assert rest is None and not reader.has_usage
    assert (completion.usage.input_tokens, completion.usage.output_tokens) == (3, 2)


THINKS = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (event({"choices": [{"index": None, "delta": {"content": "a"}, "logprobs": None}]}), [Delta("a", 1)]),
        (piece("", delta={"content": [{"type": "text", "text": "a"}]}), [Delta("a", 1)]),
        (piece("", delta={"content": [THINKS]}), [Reasoning("hm", 1)]),
        (piece("a", logprobs=-0.5), [Delta("a", 1)]),
        (event({"choices": [{"index": 0, "message": {"content": "a"}}]}), [Delta("a", 1)]),
        (b"data:\n\n" + piece("a"), [Delta("a", 1)]),
        (event({"choices": [], "error": ""}) + piece("a"), [Delta("a", 1)]),
        (piece("a\ud83db"), [Delta("a\ufffdb", 1)]),
        (piece("\\ud83d \U0001f600\ude00\ud83d."), [Delta("\\ud83d \U0001f600\ufffd\ufffd.", 1)]),
    ],
)
def test_a_chunk_of_other_types_with_one_meaning_is_read(sent: bytes, expected: list[Delta]) -> None:
    counts = {"prompt_tokens": 8.0, "completion_tokens": 1.0, "prompt_tokens_details": None}
    deltas, reader = read(sent + ending("stop") + event({"usage": counts}) + event(b"[DONE] "))
    assert (deltas, reader.done) == (expected, True)
    assert reader.finish()[1].usage.input_tokens == 8


@pytest.mark.parametrize("together", [True, False])
def test_a_character_that_is_cut_between_two_chunks_is_put_together(together: bool) -> None:
    halves = [piece("a\ud83d"), piece("b\ud83d", index=1), piece("\ude00c"), piece("\ude01d", index=1)]
    reader = CompletionReader(work(sampling={"n": 2}), token_bytes)
    deltas = [delta for one in ([b"".join(halves)] if together else halves) for delta in reader.feed(one)]
    texts = ["".join(delta.text for delta in deltas if delta.index == index) for index in (0, 1)]
    assert texts == ["a\U0001f600c", "b\U0001f601d"]


def test_a_call_with_a_character_that_is_cut_between_two_chunks_is_put_together() -> None:
    pieces = ['{"a":"\ud83d', '\ude00"}']
    calls = [{"index": 0, "id": "1", "function": {"name": "f", "arguments": one}} for one in pieces]
    sent = b"".join(piece("", delta={"tool_calls": [call]}) for call in calls)
    deltas, _ = read(sent + ending("tool_calls"))
    assert "".join(one.text for one in deltas if isinstance(one, ToolArgs)) == '{"a":"\U0001f600"}'


@pytest.mark.parametrize("wrong", [-1, -1.0, 2**31, 10**30])
def test_a_count_that_cannot_be_is_as_if_it_were_not_reported(wrong: float) -> None:
    details = {"cached_tokens": wrong, "cache_write_tokens": wrong}
    counts = {"prompt_tokens": wrong, "completion_tokens": wrong, "prompt_tokens_details": details}
    _, reader = read(piece("a") + ending("stop") + event({"choices": [], "usage": counts}) + DONE)
    assert reader.finish()[1].usage == Usage(work().input_tokens, 1, 0)
    assert reader.done and not reader.has_usage


def test_a_byte_order_mark_before_a_stream_loses_no_text() -> None:
    assert read(b"\xef\xbb\xbf" + piece("a"))[0] == [Delta("a", 1)]


def test_arguments_that_are_an_object_are_a_calls_text() -> None:
    call = {"id": 1, "function": {"name": "f", "arguments": {"a": None, "b": 1.0}}}
    deltas, _ = read(piece("", delta={"tool_calls": [call]}) + ending("tool_calls"))
    assert [type(one) for one in deltas] == [ToolBegin, ToolArgs, ToolEnd]
    assert deltas[1].text == '{"a":null,"b":1.0}'


@pytest.mark.parametrize("value", ["1e300", "[" * 300 + "]" * 300, "[" * 2000 + "]" * 2000])
def test_an_event_that_cannot_be_made_a_chunk_is_a_fault(value: str) -> None:
    reader = CompletionReader(work(), token_bytes)
    assert reader.feed(event(b'{"choices": [{"index": null, "x": %b}]}' % value.encode())) == []
    assert isinstance(reader.fault, BadHttp)


def test_an_error_after_a_chunk_of_other_types_is_reported() -> None:
    reader = CompletionReader(work(), token_bytes)
    odd = event({"choices": [{"index": None, "delta": {"content": "a"}}]})
    assert reader.feed(odd + event({"error": {"code": 503}})) == [Delta("a", 1)]
    assert isinstance(reader.fault, BackendFailure)


@pytest.mark.parametrize(
    "reported",
    [{"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, {"prompt_tokens": None}, {}],
)
def test_a_usage_of_zeros_is_none(reported: dict[str, int | None]) -> None:
    whole = piece("a") + piece("b") + ending("stop") + event({"choices": [], "usage": reported})
    _, reader = read(whole, ids=[1, 2, 3])
    _, completion = reader.finish()
    assert not reader.has_usage
    assert (completion.usage.input_tokens, completion.usage.output_tokens) == (3, 2)


@pytest.mark.parametrize("details", [{"completion_tokens_details": {"reasoning_tokens": 100}}, {}])
def test_reasoning_that_a_service_reports_beside_the_completion_is_counted(
    details: dict[str, dict[str, int]],
) -> None:
    reported = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 109, **details}
    _, reader = read(piece("a") + ending("stop") + event({"choices": [], "usage": reported}))
    rest, completion = reader.finish()
    assert (completion.usage.output_tokens, completion.usage.reasoning_tokens) == (102, 100)
    assert rest == Delta("", 101)


def test_a_text_completion_reads_like_a_chat() -> None:
    data = event({"choices": [{"index": 0, "text": "ab", "finish_reason": None}]})
    data += event({"choices": [{"index": 0, "text": "c", "finish_reason": "length"}]})
    deltas, reader = read(data)
    assert deltas == [Delta("abc", 2)]
    assert reader.finish()[1].finish_reason is FinishReason.LENGTH


def test_chat_logprobs_are_read_with_bytes_and_alternatives() -> None:
    reported = {
        "content": [
            {
                "token": "\ufffd", "logprob": -0.5, "bytes": [233],
                "top_logprobs": [
                    {"token": "\ufffd", "logprob": -0.5, "bytes": [233]},
                    {"token": "x", "logprob": -1.5, "bytes": None},
                    {"token": "y", "logprob": -2.5},
                ],
            }
        ]
    }  # fmt: skip
    [delta], _ = read(piece("", logprobs=reported), sampling={"logprobs": 2})
    [entry] = delta.logprobs
    assert (delta.tokens, entry.data, entry.logprob) == (1, b"\xe9", -0.5)
    assert [(one.data, one.logprob) for one in entry.top] == [(b"\xe9", -0.5), (b"x", -1.5)]


def test_log_probabilities_that_a_worker_does_not_give_are_said_to_be_missing() -> None:
    missing = "the worker gave no log-probabilities"
    _, reader = read(piece("a") + ending("stop"), sampling={"logprobs": 0})
    assert reader.finish()[1].warnings == (missing,)
    given = {"content": [{"token": "a", "logprob": -0.5}]}
    _, reader = read(piece("a", logprobs=given) + ending("stop"), sampling={"logprobs": 0})
    assert reader.finish()[1].warnings == ()
    _, reader = read(piece("a") + ending("stop"))
    assert reader.finish()[1].warnings == ()


def test_the_ids_that_vllm_gives_for_tokens_are_turned_into_bytes() -> None:
    reported = {
        "tokens": ["token_id:233", "b"],
        "token_logprobs": [-1.0, None],
        "top_logprobs": [{"token_id:97": -0.1, "token_id:233": -1.0}, None],
        "text_offset": [0, 1],
    }
    data = event({"choices": [{"index": 0, "text": "b", "logprobs": reported, "finish_reason": None}]})
    [delta], _ = read(data, sampling={"logprobs": 1})
    first, second = delta.logprobs
    assert (first.data, first.logprob, [one.data for one in first.top]) == (b"\xe9", -1.0, [b"a"])
    assert (second.data, second.top) == (b"b", ())


SLUICE = {"finish_reason": "stop", "fallback": None, "timings": {"queue_wait_ms": 12.0}}


def test_another_sluice_tells_its_queue_wait_and_the_true_end() -> None:
    last = event({"choices": [], "sluice": {**SLUICE, "finish_reason": "deadline"}})
    completion = read(piece("a") + ending("length") + last)[1].finish()[1]
    assert completion.finish_reason is FinishReason.DEADLINE
    assert completion.queue_wait_s == 0.012


def test_a_fallbacks_answer_of_another_sluice_shows_as_degraded() -> None:
    fallback = {"kind": "degraded_response", "reason": "queue_full", "retry_after_ms": 100}
    last = event({"choices": [], "sluice": {**SLUICE, "fallback": fallback}})
    completion = read(piece("Sorry") + ending("stop") + last)[1].finish()[1]
    assert completion.finish_reason is FinishReason.DEGRADED


def test_vllms_own_queue_time_is_passed_on() -> None:
    last = event({"choices": [], "usage": {"prompt_tokens": 1}, "metrics": {"queue_time_ms": 7.0}})
    assert read(piece("a") + ending("stop") + last)[1].finish()[1].queue_wait_s == 0.007


@pytest.mark.parametrize(
    ("reported", "kind"),
    [
        ({"message": "x", "code": 400}, FailureKind.INVALID_INPUT),
        ({"message": "x", "type": "rate_limit_error", "code": "rate_limited"}, FailureKind.THROTTLED),
        ({"message": "x", "type": "service_unavailable_error"}, FailureKind.BACKEND_UNAVAILABLE),
        ({"message": "x", "type": "NotFoundError", "code": 404}, FailureKind.MODEL_NOT_FOUND),
        ({"message": "x", "type": "rate_limit_exceeded", "code": "429"}, FailureKind.THROTTLED),
        ({"message": "x"}, FailureKind.INTERNAL),
        ("just words", FailureKind.INTERNAL),
    ],
)
def test_an_error_in_the_stream_is_told_by_its_kind(reported: object, kind: FailureKind) -> None:
    with pytest.raises(BackendFailure) as caught:
        read(event({"error": reported}))
    assert caught.value.kind is kind


@pytest.mark.parametrize(
    ("status", "body", "retry_after", "kind", "param", "retry_after_s"),
    [
        (400, {"error": {"message": "m", "param": "top_k"}}, None, FailureKind.INVALID_INPUT, "top_k", None),
        (422, {"message": "m", "param": "a b\n"}, None, FailureKind.INVALID_INPUT, None, None),
        (
            400,
            {"error": {"message": "This model's maximum context length is 1024 tokens"}},
            None,
            FailureKind.TOKEN_LIMIT_EXCEEDED,
            None,
            None,
        ),
        (
            400,  # llama.cpp
            {"error": {"code": 400, "message": "request (9 tokens) exceeds the available context size (8)"}},
            None,
            FailureKind.TOKEN_LIMIT_EXCEEDED,
            None,
            None,
        ),
        (
            422,  # Text Generation Inference
            {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096"},
            None,
            FailureKind.TOKEN_LIMIT_EXCEEDED,
            None,
            None,
        ),
        (
            400,  # Gemini
            [
                {
                    "error": {
                        "code": 400,
                        "message": "The input exceeds the maximum number of tokens allowed (8).",
                    }
                }
            ],
            None,
            FailureKind.TOKEN_LIMIT_EXCEEDED,
            None,
            None,
        ),
        (
            400,
            [{"error": {"code": 400, "message": "API key not valid. Please pass a valid API key."}}],
            None,
            FailureKind.ACCESS_DENIED,
            None,
            None,
        ),
        (
            400,  # vLLM
            {"error": {"message": "1 validation error", "param": "body.max_completion_tokens", "code": 400}},
            None,
            FailureKind.INVALID_INPUT,
            "max_tokens",
            None,
        ),
        (
            422,  # FastAPI
            {"detail": [{"loc": ["body", "max_completion_tokens"], "msg": "Extra inputs are not permitted"}]},
            None,
            FailureKind.INVALID_INPUT,
            "max_tokens",
            None,
        ),
        (
            422,  # Mistral
            {"message": {"detail": [{"loc": ["body", "stop"], "msg": "Extra inputs are not permitted"}]}},
            None,
            FailureKind.INVALID_INPUT,
            "stop",
            None,
        ),
        (422, {"detail": []}, None, FailureKind.INVALID_INPUT, None, None),
        (422, {"message": {"detail": []}}, None, FailureKind.INVALID_INPUT, None, None),
        (422, {"detail": [{"loc": ["body", "text", "input"]}]}, None, FailureKind.INVALID_INPUT, None, None),
        (401, {}, None, FailureKind.ACCESS_DENIED, None, None),
        (403, {}, None, FailureKind.ACCESS_DENIED, None, None),
        (
            403,  # OpenRouter
            {"error": {"code": 403, "message": "it requires moderation and your input was flagged for x"}},
            None,
            FailureKind.INVALID_INPUT,
            "messages",
            None,
        ),
        (404, {}, None, FailureKind.MODEL_NOT_FOUND, None, None),
        (413, {}, None, FailureKind.TOKEN_LIMIT_EXCEEDED, None, None),
        (429, {}, "7", FailureKind.THROTTLED, None, 7.0),
        (429, {}, "Wed, 21 Oct 2026 07:28:00 GMT", FailureKind.THROTTLED, None, 1.0),
        (307, {}, "", FailureKind.BACKEND_UNAVAILABLE, None, 1.0),
        (429, {}, "99999999", FailureKind.THROTTLED, None, 300.0),
        (429, {}, "nan", FailureKind.THROTTLED, None, 1.0),
        (503, {}, "2", FailureKind.THROTTLED, None, 2.0),
        (503, {}, None, FailureKind.BACKEND_UNAVAILABLE, None, 1.0),
        (504, {}, None, FailureKind.TIMEOUT, None, None),
        (502, {}, None, FailureKind.BACKEND_UNAVAILABLE, None, 1.0),
        (500, {"error": "boom"}, None, FailureKind.INTERNAL, None, None),
        (418, "words", None, FailureKind.INTERNAL, None, None),
    ],
)
def test_an_error_status_is_told_by_its_kind(
    status: int,
    body: object,
    retry_after: str | None,
    kind: FailureKind,
    param: str | None,
    retry_after_s: float | None,
) -> None:
    failure = failure_of(status, json.dumps(body).encode(), retry_after or "", model="base")
    assert (failure.kind, failure.param, failure.retry_after_s) == (kind, param, retry_after_s)


@pytest.mark.parametrize(
    "body",
    [
        {"detail": "Unexpected fields in the request: {'return_token_ids', 'cache_salt'}"},
        {"detail": [{"loc": ["body", "cache_salt"], "msg": "Extra inputs are not permitted"}]},
    ],
)
def test_a_worker_that_refuses_vllms_fields_is_reported_with_the_dialect_to_set(body: object) -> None:
    failure = failure_of(422, json.dumps(body).encode(), "", model="base")
    assert str(failure) == "the worker refuses vLLM's fields; set dialect: openai for its pool"
    assert failure.kind is FailureKind.INVALID_INPUT


def test_a_workers_own_words_are_not_passed_on() -> None:
    body = {"error": {"message": "your prompt 'my secret' is bad", "param": "my secret", "code": "my secret"}}
    assert "secret" not in str(failure_of(400, json.dumps(body).encode(), "", model="base"))


@pytest.mark.parametrize(
    "asked", ["21 Oct 99999999999999999999 07:28:00 GMT", "21 Oct 2026 07:28:00 +9" + "9" * 20]
)
def test_a_time_that_no_clock_has_is_a_pause_of_the_default_length(asked: str) -> None:
    failure = failure_of(503, b"", asked, model="base")
    assert (failure.kind, failure.retry_after_s) == (FailureKind.THROTTLED, 1.0)


@pytest.mark.parametrize(
    ("date", "expected_s"),
    [
        ("Wed, 21 Oct 2026 07:27:20 GMT", 40.0),
        ("Wed, 21 Oct 2026 07:29:20 GMT", 1.0),
        ("Tue, 20 Oct 2026 07:28:00 GMT", 300.0),
        ("Wed, 21 Oct 2026 07:27:20 -0000", 1.0),
        ("yesterday", 1.0),
        ("", 1.0),
    ],
)
def test_a_time_to_retry_at_counts_from_the_answers_own_date(date: str, expected_s: float) -> None:
    failure = failure_of(429, b"", "Wed, 21 Oct 2026 07:28:00 GMT", "", date, model="base")
    assert failure.retry_after_s == expected_s


@pytest.mark.parametrize(
    ("body", "hints"),
    [
        (
            {"detail": [{"loc": ["body", "max_completion_tokens"], "msg": "Extra inputs are not permitted"}]},
            True,
        ),
        ({"error": {"message": "Unsupported parameter: 'max_tokens'.", "param": "max_tokens"}}, True),
        ({"error": {"message": "max_tokens is too large: 9", "param": "max_tokens"}}, False),
    ],
)
def test_a_worker_that_does_not_know_the_limits_field_is_reported_with_the_key_to_set(
    body: object, hints: bool
) -> None:
    failure = failure_of(400, json.dumps(body).encode(), "", model="base")
    assert str(failure).endswith("max_tokens; set max_tokens_field of its pool") == hints
    assert failure.param == "max_tokens"


@pytest.mark.parametrize(
    ("named", "param"),
    [
        ("structured_outputs.regex", "response_format"),
        ("max_completion_tokens", "max_tokens"),
        ("temperature", "temperature"),
    ],
)
def test_a_refused_field_is_reported_by_the_gateways_name(named: str, param: str) -> None:
    body = {"error": {"message": "no", "type": "invalid_request_error", "param": named, "code": None}}
    assert failure_of(400, json.dumps(body).encode(), "", model="base").param == param


def test_a_body_that_a_worker_refuses_with_500_is_the_callers_fault() -> None:
    errors = "\n".join(
        f"  {{'type': 'literal_error', 'loc': ('body', 'messages', 1, '{role}', 'role'), 'msg': 'x'}}"
        for role in ("System", "User")
    )
    body = {"error": {"message": f"2 validation errors:\n{errors}\n", "type": "internal_server_error"}}
    failure = failure_of(500, json.dumps(body).encode(), "", model="base")
    assert (failure.kind, failure.param) == (FailureKind.INVALID_INPUT, "messages")
    assert "literal_error" not in str(failure)


@pytest.mark.parametrize(
    "message",
    [
        "Input is too long for requested model.",
        "Your input exceeds the context window of this model.",
        "invalid params, context window exceeds limit (2013)",
        "This model's maximum prompt length is 131072 but the request contains 136973 tokens.",
        "Invalid request: Your request exceeded model token limit: 262144",
        "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 98304]",
    ],
)
def test_a_services_words_for_a_prompt_that_is_too_long_are_known(message: str) -> None:
    failure = failure_of(400, json.dumps({"error": {"message": message}}).encode(), "", model="base")
    assert failure.kind is FailureKind.TOKEN_LIMIT_EXCEEDED


def test_a_worker_that_was_started_without_tools_is_reported_as_such() -> None:
    message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
    failure = failure_of(400, json.dumps(body).encode(), "", model="base")
    assert (failure.kind, failure.param) == (FailureKind.INVALID_INPUT, "tools")
    assert "was started without --enable-auto-tool-choice" in str(failure)


def test_a_budget_of_thinking_is_named_when_the_worker_was_started_without_reasoning() -> None:
    message = (
        "thinking_token_budget is set but reasoning_config is not configured. Please set --reasoning-config"
    )
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
    failure = failure_of(400, json.dumps(body).encode(), "", model="base")
    assert (failure.kind, failure.param) == (FailureKind.INVALID_INPUT, "thinking_token_budget")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (
            "Model 'm' does not support Matryoshka embeddings; dimensions must be unset"
            " (received dimensions=8).",
            "dimensions",
        ),
        ("Model 'm' only supports dimensions in range [1, 384], got 512.", "dimensions"),
        (
            "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation"
            " size.",
            "truncate_prompt_tokens",
        ),
        ("max_tokens_per_doc (5000) must be less than max_model_len (1024).", "max_tokens_per_doc"),
        ("max_tokens_per_query (5000) must be less than max_model_len (1024).", "max_tokens_per_query"),
    ],
)
def test_what_vllm_refuses_about_vectors_and_scores_is_named_and_is_no_long_prompt(
    message: str, field: str
) -> None:
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
    failure = failure_of(400, json.dumps(body).encode(), "", model="m")
    assert (failure.kind, failure.param) == (FailureKind.INVALID_INPUT, field)
    assert str(failure).endswith(f"the worker refused the request: {field}")


def test_a_broken_image_is_refused_with_the_name_of_the_messages() -> None:
    message = "Failed to load image: image file is truncated"
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
    failure = failure_of(400, json.dumps(body).encode(), "", model="base")
    assert (failure.kind, failure.param) == (FailureKind.INVALID_INPUT, "messages")


def test_an_unusable_key_is_told_to_the_operator_without_the_key() -> None:
    assert "api_key_env" in str(failure_of(401, b"", "", model="base"))


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (ConnectFailed("refused"), FailureKind.BACKEND_UNAVAILABLE, FailureKind.STREAM_BROKEN),
        (ConnectionLost("gone"), FailureKind.STREAM_BROKEN, FailureKind.STREAM_BROKEN),
        (TimedOut("nothing more came", 3), FailureKind.TIMEOUT, FailureKind.TIMEOUT),
        (BadHttp("html"), FailureKind.BACKEND_UNAVAILABLE, FailureKind.STREAM_BROKEN),
        (ConnectionsInUse("all"), FailureKind.THROTTLED, FailureKind.STREAM_BROKEN),
    ],
)
def test_every_transport_error_has_a_kind(
    error: TransportError, before: FailureKind, after: FailureKind
) -> None:
    assert failure_of_transport(error, delivered=False).kind is before
    assert failure_of_transport(error, delivered=True).kind is after


def test_every_transport_error_has_a_row_above() -> None:
    rows = {ConnectFailed, ConnectionLost, TimedOut, BadHttp, ConnectionsInUse}
    assert set(TransportError.__subclasses__()) == rows


@settings(deadline=None)
@given(st.binary())
def test_no_bytes_raise_anything_but_a_transport_error_or_a_backend_failure(data: bytes) -> None:
    reader = CompletionReader(replace(work(), token_ids=(1,)), token_bytes)
    try:
        reader.feed(data + b"\n\n")
        reader.feed(b"data: " + data + b"\n\n")
        if reader.fault is not None:
            raise reader.fault
        reader.finish()
    except (TransportError, BackendFailure) as expected:
        assert str(expected)
