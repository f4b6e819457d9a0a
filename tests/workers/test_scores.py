"""Answers of a worker's ``/rerank`` and ``/score`` that cannot be given to a caller."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from gateway.contracts.rerank import ScoreRequest
from gateway.contracts.values import Caller, CallerRole
from resilience.failures import BackendFailure, FailureKind
from tests.workers.raw_worker import RawWorker, pool, refuses
from tests.workers.score_worker import ScoreWorker, score_of

TEXTS = ("sea", "book", "tea")


def part(endpoint: Literal["rerank", "score"] = "rerank", **options: Any) -> ScoreRequest:
    return ScoreRequest(
        request_id="req_1",
        generation_id="gen_1",
        caller=Caller("acme", CallerRole.CALLER, "key_1"),
        arrived_at=0.0,
        created=0,
        model="base",
        pairs=tuple([("a sea", one) for one in TEXTS]),
        tokens=9,
        endpoint=endpoint,
        options=options,
    )


def ranked(*pairs: tuple[int, Any]) -> dict[str, Any]:
    return {"results": [{"index": index, "relevance_score": score} for index, score in pairs]}


UNUSABLE = {
    "one too few": ranked((0, 0.1), (1, 0.2)),
    "one twice": ranked((0, 0.1), (1, 0.2), (1, 0.3)),
    "an index beyond the texts": ranked((0, 0.1), (1, 0.2), (3, 0.3)),
    "no number": ranked((0, 0.1), (1, 0.2), (2, "high")),
    "none at all": {"data": []},
    "beyond all numbers": ranked((0, 0.1), (1, 0.2), (2, "1e999")),
}


@pytest.mark.parametrize("reply", UNUSABLE.values(), ids=UNUSABLE)
async def test_unusable_scores_are_asked_for_on_another_worker(reply: Any) -> None:
    bad, good = RawWorker([refuses(200, reply)]), ScoreWorker(model="base")
    async with pool(bad, good, affinity=False) as backend:
        for _ in range(3):  # the pool may choose either worker first
            made = await backend.score(part())
            assert list(made.results) == [score_of("a sea", one) for one in TEXTS]
    assert bad.requests


async def test_unusable_scores_of_the_only_worker_are_an_error() -> None:
    async with pool(RawWorker([refuses(200, UNUSABLE["one twice"])])) as backend:
        with pytest.raises(BackendFailure, match="scores") as caught:
            await backend.score(part())
        assert caught.value.kind is FailureKind.BACKEND_UNAVAILABLE


async def test_each_endpoint_is_asked_as_vllm_has_it() -> None:
    worker = ScoreWorker(model="base")
    async with pool(worker) as backend:
        reranked = await backend.score(part(max_tokens_per_doc=9))
        scored = await backend.score(part("score"))
    assert reranked.results == scored.results
    first, second = [one.body for one in worker.requests]
    assert first == {
        "model": "base",
        "query": "a sea",
        "documents": list(TEXTS),
        "top_n": 3,
        "return_documents": False,
        "max_tokens_per_doc": 9,
    }
    assert second == {"model": "base", "text_1": "a sea", "text_2": list(TEXTS)}, "it is computed once"
    assert [one.path for one in worker.requests] == ["/v1/rerank", "/v1/score"]


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [(None, 9), ({"prompt_tokens": 0, "total_tokens": 0}, 9), ({"prompt_tokens": -1, "total_tokens": 7}, 7)],
)
async def test_scores_without_a_count_are_billed_by_the_estimate(usage: Any, tokens: int) -> None:
    reply = {**ranked((0, 0.1), (1, 0.2), (2, 0.3)), "usage": usage}
    async with pool(RawWorker([refuses(200, reply)])) as backend:
        assert (await backend.score(part())).input_tokens == tokens
