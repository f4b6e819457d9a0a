from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.contracts.answer import Choice, Fallback
from gateway.contracts.events import Delta
from gateway.contracts.values import FinishReason, GenerateRequest
from gateway.errors import PublicError
from gateway.generation.sink import Sink
from gateway.http.fan_out import AT_ONCE
from gateway.testing import FakeJourney, answer_for, fake_services
from tests.sse import json_events

BUSY = PublicError(503, "queue_full", "the gateway is busy", retry_after_ms=1_200)
TOO_LONG = PublicError(400, "context_too_long", "messages are too long", "messages")


class EchoJourney(FakeJourney):
    """Answers each prompt with ``n`` texts that name it; the first prompts end last.

    A prompt in ``fails`` gets its error, ``silent`` gets no end event, and the prompt "waits" never ends.
    """

    def __init__(self, fails: dict[str, PublicError] | None = None, silent: str = "") -> None:
        super().__init__()
        self.most = 0
        self._fails, self._silent = fails or {}, silent

    async def _run(self, request: GenerateRequest, sink: Sink) -> None:
        self.most = max(self.most, self.running)
        prompt = str(request.raw_prompt)
        for _ in range(max(1, 40 - 2 * len(self.requests))):
            await asyncio.sleep(0)
        if prompt in self._fails:
            error = request.in_body_terms(self._fails[prompt])
            await sink.fail(error)
            return
        if prompt == "waits":
            await asyncio.Event().wait()
        if prompt == self._silent:
            return
        texts = [f"{prompt}/{index}" for index in range(request.sampling.n)]
        for index, text in enumerate(texts):
            await sink.delta(Delta(text, 1, index=index))
            await asyncio.sleep(0)
        others = tuple(Choice(text, FinishReason.STOP) for text in texts[1:])
        await sink.finish(replace(answer_for(request, texts[0]), others=others, **self.changes))


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, **fields}


async def test_each_prompt_is_a_request_and_their_choices_are_numbered_in_order(connect: Any) -> None:
    journey = EchoJourney()
    async with connect(fake_services(journey)) as client:
        answer = (await client.post("/v1/completions", json=body(["a", "b", "c"], n=2))).json()
    assert [one["index"] for one in answer["choices"]] == list(range(6))
    assert [one["text"] for one in answer["choices"]] == ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3 * 842, 3 * 137)
    assert answer["sluice"]["budget"]["recent_turns"] == 3 * 250
    first, second, third = [one.generation_id for one in journey.requests]
    assert (answer["id"], second, third) == (f"cmpl-{first}", f"{first}-1", f"{first}-2")
    assert {one.request_id for one in journey.requests} == {answer["sluice"]["request_id"]}


async def test_lists_of_token_ids_are_prompts_too(connect: Any) -> None:
    journey = EchoJourney()
    async with connect(fake_services(journey)) as client:
        answer = (await client.post("/v1/completions", json=body([[1, 2], [3]]))).json()
    assert [one.raw_prompt for one in journey.requests] == [(1, 2), (3,)]
    assert len(answer["choices"]) == 2


async def test_a_streams_chunks_carry_the_numbers_of_the_whole_answer(connect: Any) -> None:
    fields = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    async with connect(fake_services(EchoJourney())) as client:
        response = await client.post("/v1/completions", json=body(["a", "b"], **fields))
    assert response.text.endswith("data: [DONE]\n\n")
    chunks = list(json_events(response.text.split("\n")))
    texts = {one["index"]: one["text"] for chunk in chunks for one in chunk["choices"] if one["text"]}
    assert texts == {0: "a/0", 1: "a/1", 2: "b/0", 3: "b/1"}
    ends = [one["index"] for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
    assert ends == [0, 1, 2, 3]
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * 137


async def test_of_many_prompts_only_a_bounded_number_runs_at_one_time(connect: Any) -> None:
    journey = EchoJourney()
    prompts = [f"p{index}" for index in range(3 * AT_ONCE)]
    async with connect(fake_services(journey)) as client:
        answer = (await client.post("/v1/completions", json=body(prompts))).json()
    assert [one["text"] for one in answer["choices"]] == [f"{one}/0" for one in prompts]
    assert (journey.most, len(journey.requests)) == (AT_ONCE, len(prompts))


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failed_prompt_fails_the_body_and_cancels_the_others(connect: Any, stream: bool) -> None:
    journey = EchoJourney({"b": BUSY})
    prompts = ["waits", "b", *["waits"] * AT_ONCE]
    async with connect(fake_services(journey)) as client:
        response = await client.post("/v1/completions", json=body(prompts, stream=stream))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
    assert (journey.cancelled, journey.running, len(journey.requests)) == (AT_ONCE - 1, 0, AT_ONCE)


async def test_an_error_names_the_prompt_that_it_is_of(connect: Any) -> None:
    async with connect(fake_services(EchoJourney({"b": TOO_LONG}))) as client:
        response = await client.post("/v1/completions", json=body(["a", "b"]))
    error = response.json()["error"]
    message = "This model's maximum context length is exceeded: prompt.1 are too long"
    assert (error["param"], error["message"]) == ("prompt.1", message)


async def test_a_prompt_without_an_end_is_no_answer_with_fewer_choices(connect: Any) -> None:
    async with connect(fake_services(EchoJourney(silent="b"))) as client:
        response = await client.post("/v1/completions", json=body(["a", "b"]))
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")


class SecondFallsBack(FakeJourney):
    """The first prompt's text ends at a stop string, a later one comes from a fallback."""

    async def _run(self, request: GenerateRequest, sink: Sink) -> None:
        answer = answer_for(request, "text", stop_sequence="END")
        if request.raw_prompt != "a":
            answer = answer_for(request, "sorry", fallback=Fallback("degraded_response", "queue_full"))
        await sink.finish(answer)


async def test_the_first_texts_stop_string_is_named_though_another_text_is_a_fallbacks(connect: Any) -> None:
    async with connect(fake_services(SecondFallsBack())) as client:
        answer = (await client.post("/v1/completions", json=body(["a", "b"], stop="END"))).json()
    assert [one["stop_reason"] for one in answer["choices"]] == ["END", None]
    assert answer["sluice"]["fallback"]["kind"] == "degraded_response"


async def test_an_answer_with_one_fallbacks_text_is_not_stored_under_a_key(connect: Any) -> None:
    journey = EchoJourney()
    journey.changes = {"backend": "degraded", "fallback": Fallback("degraded_response", "queue_full")}
    async with connect(fake_services(journey)) as client:
        for _ in range(2):
            headers = {"idempotency-key": "one"}
            answer = await client.post("/v1/completions", json=body(["a", "b"]), headers=headers)
            assert answer.json()["sluice"]["fallback"]["kind"] == "degraded_response"
    assert len(journey.requests) == 4
