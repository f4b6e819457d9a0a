"""Echoed prompts: what vLLM is asked, how its first chunk is read and billed, and what is written of it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gateway.backends.workers.answer import CompletionReader
from gateway.backends.workers.dialect import FEATURES, MAX_ECHOED_LOGPROBS, Dialect
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.features import Feature
from gateway.contracts.openai_logprobs import Offsets, completion_logprobs
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.sse import MAX_EVENT_BYTES
from gateway.contracts.values import TokenLogprob
from gateway.testing import answer_for
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import collect
from tests.contracts.test_stream_frames import REQUEST
from tests.workers.raw_worker import (
    DONE,
    END,
    STREAM_HEAD,
    RawWorker,
    Request,
    chunk,
    event,
    make_writer,
    pool,
    usage,
    work,
)

ECHO = {"echo": True, "logprobs": 1, "max_tokens": 2}


def first(logprobs: Any = None, text: str = "Hello there", tokens: int = 1) -> bytes:
    """vLLM's first chunk: the text of the prompt and the first token; its count has generated tokens only."""
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}
    return event({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": tokens}})


def last(text: str, tokens: int, logprobs: Any = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "length"}
    return event({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": tokens}})


def parallel(*tokens: tuple[str, float | None]) -> dict[str, Any]:
    return {
        "tokens": [name for name, _ in tokens],
        "token_logprobs": [value for _, value in tokens],
        "top_logprobs": [None if value is None else {name: value} for name, value in tokens],
        "text_offset": [0] * len(tokens),
    }


def asked(**sampling: Any) -> dict[str, Any]:
    writer = make_writer("base")
    body: dict[str, Any] = json.loads(writer.write(work(ids=[5, 6], messages=(), sampling=sampling)).body)
    return body


def test_vllm_is_asked_for_the_prompts_text_which_it_leaves_out_with_token_ids() -> None:
    body = asked(**ECHO)
    assert (body["echo"], body["logprobs"], body["max_tokens"]) == (True, 1, 2)
    assert "return_token_ids" not in body
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert asked(**ECHO, prompt_only=True)["max_tokens"] == 0
    assert "echo" not in asked() and asked()["return_token_ids"] is True


def test_vllm_alone_can_echo() -> None:
    assert [one for one in Dialect if Feature.ECHO in FEATURES[one]] == [Dialect.VLLM]


def test_an_echoed_prompt_is_text_and_no_output() -> None:
    asked_for = work(ids=[5, 6], messages=(), sampling=ECHO)
    texts = {5: b"Hel", 6: b"lo", 7: b" there", 8: b"!"}
    reader = CompletionReader(asked_for, texts.__getitem__, running_counts=True)
    prompt = parallel(("token_id:5", None), ("token_id:6", -0.5), ("token_id:7", -0.25))
    deltas = reader.feed(first(prompt))
    deltas += reader.feed(last("!", 2, parallel(("token_id:8", -1.5))) + usage(2, 2) + DONE)
    rest, completion = reader.finish()
    assert rest is None and [delta.text for delta in deltas] == ["Hello there", "!"]
    assert [delta.tokens for delta in deltas] == [1, 1]
    assert (completion.usage.input_tokens, completion.usage.output_tokens) == (2, 2)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.data for entry in entries] == [b"Hel", b"lo", b" there", b"!"]
    assert math.isnan(entries[0].logprob) and [one.logprob for one in entries[1:]] == [-0.5, -0.25, -1.5]


def test_a_token_without_a_probability_is_null() -> None:
    entries = (TokenLogprob(b"Hel", math.nan), TokenLogprob(b"lo", -0.5, (TokenLogprob(b"p", -0.25),)))
    shown = completion_logprobs(entries, Offsets())
    assert (shown["token_logprobs"], shown["text_offset"]) == ([None, -0.5], [0, 3])
    assert shown["top_logprobs"] == [None, {"p": -0.25, "lo": -0.5}]
    whole = OpenAIDialect(chat=False).whole(ParsedRequest(REQUEST), answer_for(REQUEST, "", logprobs=entries))
    assert json.loads(whole)["choices"][0]["logprobs"] == shown


def test_log_probabilities_of_a_long_prompt_may_be_longer_than_other_events() -> None:
    tokens = parallel(("token_id:5", None), *[("token_id:128000", -12.345678901234567)] * 16_383)
    answer = first(tokens) + last("", 1) + DONE
    assert len(answer) > MAX_EVENT_BYTES
    asked_for = work(ids=[5] * 16_384, messages=(), sampling=ECHO)
    reader = CompletionReader(asked_for, lambda token: b"x", running_counts=True)
    (delta, *_) = reader.feed(answer)
    assert (len(delta.logprobs), delta.tokens) == (16_384, 1)


async def test_too_many_log_probabilities_are_refused_before_a_worker_is_asked() -> None:
    worker = RawWorker([lambda request: request.whole(500, b"")])
    many = work(ids=[5] * (MAX_ECHOED_LOGPROBS // 2 + 1), messages=(), sampling=ECHO)
    async with pool(worker) as backend:
        with pytest.raises(BackendFailure, match="log-probabilities") as refused:
            await collect(backend, many)
    assert (refused.value.kind, refused.value.param) == (FailureKind.INVALID_INPUT, "logprobs")
    assert worker.requests == []


async def test_an_echo_that_breaks_off_is_not_resumed() -> None:
    async def breaks(request: Request) -> None:
        await request.send(STREAM_HEAD, chunk(first()))
        request.reset()

    async def answers(request: Request) -> None:
        await request.send(STREAM_HEAD, chunk(first() + last("!", 2) + usage(2, 2) + DONE), END)

    echo = {"echo": True, "max_tokens": 2}
    async with pool(RawWorker([answers, breaks])) as backend:
        answer = await collect(backend, work(ids=[5, 6], messages=(), sampling=echo))
        assert answer.completion.usage.output_tokens == 2
        with pytest.raises(BackendFailure) as broken:
            await collect(backend, work(ids=[5, 6], messages=(), sampling=echo))
    assert broken.value.kind is FailureKind.STREAM_BROKEN
