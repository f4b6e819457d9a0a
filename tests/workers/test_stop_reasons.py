"""Why a worker says that a text ended: the stop string (vLLM's ``stop_reason``), a filter, a refusal."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from budgeting.values import Tool
from gateway.backends.port import Work
from gateway.backends.workers.answer import CompletionReader
from gateway.backends.workers.errors import ConnectionLost
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.events import Delta
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.values import FinishReason, Sampling
from gateway.testing import answer_for
from tests.contracts.test_stream_frames import REQUEST


@pytest.mark.parametrize(
    ("reported", "stop"), [("END", "END"), (None, None), (151645, None), ("another", None)]
)
def test_the_stop_string_is_one_of_the_requests(reported: object, stop: str | None) -> None:
    reader = CompletionReader(
        Work("gen_1", (1, 2, 3), (), Sampling(max_tokens=64, stop=("END", "STOP"))), lambda token: b""
    )
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop", "stop_reason": reported}
    reader.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n")
    _, completion = reader.finish()
    assert completion.stop_sequence == stop


def test_the_stop_string_of_an_sglang_is_read() -> None:
    reader = CompletionReader(
        Work("gen_1", (1,), (), Sampling(max_tokens=64, stop=("END",))), lambda token: b""
    )
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop", "matched_stop": "END"}
    reader.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n")
    assert reader.finish()[1].stop_sequence == "END"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("eos", FinishReason.STOP),
        ("model_length", FinishReason.LENGTH),
        ("MAX_TOKENS", FinishReason.LENGTH),
        ("repetition", FinishReason.LENGTH),
        ("content_filter: OTHER", FinishReason.CONTENT_FILTER),
    ],
)
def test_a_cut_answer_is_not_complete_whatever_word_the_service_has_for_it(
    said: str, reason: FinishReason
) -> None:
    reader = CompletionReader(Work("gen_1", (1,), (), Sampling(max_tokens=64)), lambda token: b"")
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": said}
    reader.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n")
    assert reader.finish()[1].finish_reason is reason


@pytest.mark.parametrize("said", ["", "null"])
def test_an_answer_that_breaks_off_is_not_whole_though_each_chunk_has_an_empty_finish_reason(
    said: str,
) -> None:
    reader = CompletionReader(Work("gen_1", (1,), (), Sampling(max_tokens=64)), lambda token: b"")
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": said}
    reader.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    with pytest.raises(ConnectionLost):
        reader.finish()


@pytest.mark.parametrize("stop", ["END", None])
@pytest.mark.parametrize("chat", [True, False])
def test_answers_have_the_stop_string_and_a_sluice_in_front_reads_it(stop: str | None, chat: bool) -> None:
    request = structs.replace(REQUEST, sampling=Sampling(max_tokens=64, stop=("END",)))
    asked, answer = ParsedRequest(request), answer_for(request, "x")
    answer = structs.replace(answer, finish_reason=FinishReason.STOP, stop_sequence=stop)
    dialect = OpenAIDialect(chat=chat)
    [choice] = json.loads(dialect.whole(asked, answer))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    frames = dialect.frames(asked)
    reader = CompletionReader(Work("gen_1", (1, 2, 3), (), request.sampling), lambda token: b"")
    reader.feed(frames.opening + frames.delta(Delta("x", 1)) + frames.finish(answer))
    assert reader.finish()[1].stop_sequence == stop


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        ({"content": "I can"}, "content_filter"),
        ({"refusal": "I can"}, "stop"),
        ({"content": "I ", "refusal": "can"}, "stop"),
    ],
)
@pytest.mark.parametrize("chat", [True, False])
def test_a_text_cut_by_a_filter_and_a_refusal_are_no_complete_answers(
    delta: dict[str, str], reason: str, chat: bool
) -> None:
    reader = CompletionReader(Work("gen_1", (1, 2, 3), (), Sampling(max_tokens=64)), lambda token: b"")
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
    ]
    deltas = [
        one for chunk in chunks for one in reader.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    ]
    assert "".join(one.text for one in deltas) == "I can"
    assert reader.finish()[1].finish_reason is FinishReason.CONTENT_FILTER
    answer = structs.replace(answer_for(REQUEST, "I can"), finish_reason=FinishReason.CONTENT_FILTER)
    [choice] = json.loads(OpenAIDialect(chat=chat).whole(ParsedRequest(REQUEST), answer))["choices"]
    assert choice["finish_reason"] == "content_filter"


@pytest.mark.parametrize(
    "more",
    [
        {"refusal": "no"},
        {"reasoning": "so"},
        {"reasoning_content": "so"},
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    ],
)
def test_a_piece_that_has_more_than_text_is_not_read_as_text_alone(more: dict[str, object]) -> None:
    work = Work("gen_1", (1,), (), Sampling(max_tokens=64), tools=(Tool("f"),))
    reader = CompletionReader(work, lambda token: b"")
    choice = {"index": 0, "delta": {"content": "x", **more}}
    deltas = reader.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    assert "x" in "".join(delta.text for delta in deltas) != "x"
