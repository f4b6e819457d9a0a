"""Answers of a worker's ``/embeddings`` that cannot be given to a caller."""

from __future__ import annotations

from array import array
from base64 import b64encode
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.backends.port import BackendState
from gateway.contracts.embeddings import Conversation, EmbeddingsRequest
from gateway.contracts.values import Caller, CallerRole
from resilience.failures import BackendFailure, FailureKind
from tests.workers.raw_worker import RawWorker, pool, refuses
from tests.workers.vector_worker import VectorWorker, vector_of

INPUTS = ("one", "two", "three")
PART = EmbeddingsRequest(
    request_id="req_1",
    generation_id="gen_1",
    caller=Caller("acme", CallerRole.CALLER, "key_1"),
    arrived_at=0.0,
    created=0,
    model="base",
    inputs=INPUTS,
    tokens=3,
)
GOOD = [{"index": index, "embedding": vector_of(text).tolist()} for index, text in enumerate(INPUTS)]


def same(*numbers: float) -> list[dict[str, Any]]:
    coded = b64encode(array("f", numbers)).decode()
    return [{"index": index, "embedding": coded} for index in range(3)]


UNUSABLE = {
    "one too few": GOOD[:2],
    "one twice": [GOOD[0], GOOD[1], GOOD[1]],
    "an index beyond the inputs": [GOOD[0], GOOD[1], {**GOOD[2], "index": 3}],
    "of several lengths": [GOOD[0], GOOD[1], {"index": 2, "embedding": [1.0]}],
    "empty": same(),
    "not a number": same(1.0, float("nan")),
    "infinite": same(float("-inf"), float("inf")),
    "beyond 32 bits": [{"index": index, "embedding": [1e300]} for index in range(3)],
    "no base64": [{"index": index, "embedding": "*"} for index in range(3)],
    "a part of a number": [{"index": index, "embedding": "AAAA"} for index in range(3)],
}


@pytest.mark.parametrize("data", UNUSABLE.values(), ids=UNUSABLE)
async def test_unusable_vectors_are_asked_for_on_another_worker(data: Any) -> None:
    bad, good = RawWorker([refuses(200, {"data": data})]), VectorWorker(model="base")
    async with pool(bad, good, affinity=False) as backend:
        for _ in range(3):  # the pool may choose either worker first
            made = await backend.embed(PART)
            assert list(made.results) == [b64encode(vector_of(text)).decode() for text in INPUTS]
    assert bad.requests


async def test_a_service_that_asks_for_a_pause_gets_no_requests_for_vectors_meanwhile() -> None:
    busy, idle = RawWorker([refuses(429, None, "retry-after: 600")]), VectorWorker(model="base")
    async with pool(busy, idle, affinity=False) as backend:
        for _ in range(6):
            await backend.embed(PART)
        assert len(busy.requests) == 1
    busy = RawWorker([refuses(429, None, "retry-after: 600")])
    async with pool(busy, affinity=False) as backend:
        for _ in range(2):
            with pytest.raises(BackendFailure) as caught:
                await backend.embed(PART)
            assert caught.value.kind is FailureKind.THROTTLED and not caught.value.counts
            assert (caught.value.retry_after_s or 0) > 200
        assert len(busy.requests) == 1


async def test_the_death_of_a_pools_last_worker_for_vectors_does_not_count_for_its_circuit() -> None:
    only = VectorWorker(model="base", dies_after=1)
    async with pool(only, probe_interval_seconds=60, eject_seconds=60) as backend:
        for _ in range(2):  # the second time no worker is in service
            with pytest.raises(BackendFailure) as caught:
                await backend.embed(PART)
            assert not caught.value.counts
        assert backend.state is BackendState.STARTING


async def test_a_request_for_vectors_carries_the_trace_context() -> None:
    worker = VectorWorker(model="base")
    async with pool(worker) as backend:
        await backend.embed(replace(PART, trace_headers=b"traceparent: 00-aa-bb-01\r\n"))
    assert worker.requests[-1].headers["traceparent"] == "00-aa-bb-01"


@pytest.mark.parametrize("data", UNUSABLE.values(), ids=UNUSABLE)
async def test_unusable_vectors_of_the_only_worker_are_an_error(data: Any) -> None:
    async with pool(RawWorker([refuses(200, {"data": data})])) as backend:
        with pytest.raises(BackendFailure, match="embedding") as caught:
            await backend.embed(PART)
        assert caught.value.kind is FailureKind.BACKEND_UNAVAILABLE


async def test_vectors_without_an_index_are_in_the_order_of_the_inputs() -> None:
    data = [{"embedding": one["embedding"]} for one in GOOD]
    async with pool(RawWorker([refuses(200, {"data": data})])) as backend:
        made = await backend.embed(PART)
    assert list(made.results) == [b64encode(vector_of(text)).decode() for text in INPUTS]


async def test_the_worker_gets_the_messages_of_a_conversation_in_place_of_an_input() -> None:
    talk = ({"role": "user", "content": "a book"}, {"role": "assistant", "content": "which one"})
    worker = RawWorker([refuses(200, {"data": GOOD[:1]})])
    async with pool(worker) as backend:
        await backend.embed(replace(PART, inputs=(Conversation(talk),)))
    [request] = worker.requests
    assert request.body == {"model": "base", "messages": list(talk), "encoding_format": "base64"}


async def test_conversations_of_a_part_are_one_call_of_the_worker() -> None:
    talks = [[{"role": "user", "content": text}] for text in INPUTS]
    worker = RawWorker([refuses(200, {"data": GOOD})])
    async with pool(worker) as backend:
        made = await backend.embed(replace(PART, inputs=tuple([Conversation(tuple(one)) for one in talks])))
    [request] = worker.requests
    assert request.body == {"model": "base", "messages": talks, "encoding_format": "base64"}
    assert list(made.results) == [b64encode(vector_of(text)).decode() for text in INPUTS]


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 0, "total_tokens": 0}, {"prompt_tokens": -1}])
async def test_vectors_without_a_count_are_billed_by_the_estimate(usage: Any) -> None:
    async with pool(RawWorker([refuses(200, {"data": GOOD, "usage": usage})])) as backend:
        assert (await backend.embed(PART)).input_tokens == PART.tokens
