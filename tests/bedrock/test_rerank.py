"""Rerank of Cohere and Amazon by InvokeModel, on the stand-in."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from msgspec import structs

from benchmarks.bedrock.stand_in import Behaviour, StandIn
from budgeting.values import Message, Role
from gateway.backends.bedrock.answer import InvokedModel
from gateway.backends.bedrock.backend import BedrockReranker
from gateway.backends.bedrock.invoked import scores_of
from gateway.backends.port import Work, scores_texts
from gateway.contracts.rerank import ScoreRequest
from gateway.contracts.values import Caller, CallerRole, Sampling
from gateway.health.probe import short_work
from resilience.failures import BackendFailure, FailureKind
from tests.bedrock.conftest import MakeBackend
from tests.bedrock.support import wait_idle

COHERE, AMAZON = "cohere.rerank-v3-5:0", "amazon.rerank-v1:0"


def part(
    *texts: str, model: str = COHERE, endpoint: Literal["rerank", "score"] = "rerank", **options: Any
) -> ScoreRequest:
    return ScoreRequest(
        request_id="req_1",
        generation_id="gen_1",
        caller=Caller("acme", CallerRole.CALLER, "key_1"),
        arrived_at=0.0,
        created=0,
        model=model,
        pairs=tuple([("q", one) for one in texts]),
        tokens=99,
        endpoint=endpoint,
        options=options,
    )


@pytest.mark.parametrize("model", [COHERE, AMAZON])
async def test_scores_are_in_the_order_of_the_texts(bedrock: StandIn, make: MakeBackend, model: str) -> None:
    backend = make(model_id=model)
    assert isinstance(backend, BedrockReranker) and scores_texts(backend)
    made = await backend.score(part("xxxx", "x", "xx", model=model))
    assert (made.results, made.input_tokens) == ([0.25, 1.0, 0.5], 99)
    asked = {"modelId": model, "query": "q", "documents": ["xxxx", "x", "xx"], "top_n": 3}
    assert bedrock.last == asked | ({"api_version": 2} if model == COHERE else {})
    assert (await backend.score(part("xx", model=model, endpoint="score"))).results == [0.5]
    await wait_idle(backend)


async def test_what_the_model_cannot_be_asked_for_is_refused_by_field(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make(model_id=COHERE)
    assert isinstance(backend, BedrockReranker)
    two = structs.replace(part(endpoint="score"), pairs=(("q", "x"), ("other", "y")))
    for asked, param in (
        (part("x", truncate_prompt_tokens=9), "truncate_prompt_tokens"),
        (two, "text_1"),
        (structs.replace(two, names=("queries", "items")), "queries"),
    ):
        with pytest.raises(BackendFailure) as caught:
            await backend.score(asked)
        assert (caught.value.kind, caught.value.param) == (FailureKind.INVALID_INPUT, param)
    assert bedrock.seen == []


@pytest.mark.parametrize("indices", [(0, 1, 1), (0, 1, 2, 2), (0, 1, 3), (0, 1)], ids=str)
def test_an_answer_without_one_score_for_each_text_is_not_readable(indices: tuple[int, ...]) -> None:
    body = {"results": [{"index": index, "relevance_score": 0.5} for index in indices]}
    with pytest.raises(BackendFailure, match="scores") as caught:
        scores_of(InvokedModel(json.dumps(body).encode(), 9), part("x", "y", "z"))
    assert caught.value.kind is FailureKind.STREAM_BROKEN


async def test_a_refusal_of_bedrocks_is_a_failure(bedrock: StandIn, make: MakeBackend) -> None:
    backend = make(model_id=COHERE)
    assert isinstance(backend, BedrockReranker)
    bedrock.script(Behaviour(status=400, error="ValidationException", message="too long"))
    with pytest.raises(BackendFailure) as caught:
        await backend.score(part("x"))
    assert caught.value.kind is FailureKind.INVALID_INPUT


@pytest.mark.parametrize(
    "model", [COHERE, AMAZON, "amazon.titan-embed-text-v2:0", "anthropic.claude-3-haiku-20240307-v1:0"]
)
async def test_the_test_of_a_backend_is_work_that_its_model_does(
    bedrock: StandIn, make: MakeBackend, model: str
) -> None:
    backend = make(model_id=model)
    work = Work("test", (), (Message(Role.USER, "test"),), Sampling(max_tokens=1))
    assert (await short_work(backend, work)).input_tokens
    [(_, operation, _)] = bedrock.seen
    assert operation == ("invoke" if "claude" not in model else "converse-stream")
    await wait_idle(backend)
