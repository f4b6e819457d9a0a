"""Embeddings of Titan and Cohere by InvokeModel, on the stand-in."""

from __future__ import annotations

from array import array
from base64 import b64decode
from typing import Any

import pytest

from benchmarks.bedrock.stand_in import TOKENS_EACH, Behaviour, StandIn
from gateway.backends.bedrock.backend import BedrockEmbeddings
from gateway.backends.port import makes_vectors
from gateway.contracts.embeddings import Conversation, EmbeddingsAnswer, EmbeddingsRequest
from gateway.contracts.values import Caller, CallerRole
from resilience.failures import BackendFailure, FailureKind
from tests.bedrock.conftest import HAIKU, MakeBackend
from tests.bedrock.support import wait_idle

TITAN, TITAN_1 = "amazon.titan-embed-text-v2:0", "amazon.titan-embed-text-v1"
COHERE, COHERE_4 = "cohere.embed-multilingual-v3", "us.cohere.embed-v4:0"


def part(model: str, count: int = 3, *more: Any, **changes: Any) -> EmbeddingsRequest:
    inputs = (*(str(number) for number in range(1, count + 1)), *more)
    return EmbeddingsRequest(
        request_id="req_1",
        generation_id="gen_1",
        caller=Caller("acme", CallerRole.CALLER, "key_1"),
        arrived_at=0.0,
        created=0,
        model=model,
        inputs=inputs,
        tokens=99,
        **changes,
    )


def numbers(answer: EmbeddingsAnswer) -> list[list[float]]:
    return [array("f", b64decode(one)).tolist() for one in answer.results]


def expected(count: int) -> list[list[float]]:
    third = array("f", [1 / 3])[0]
    return [[float(number), third] for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("model", "count", "calls"), [(TITAN, 3, 3), (TITAN_1, 2, 2), (COHERE, 100, 2), (COHERE_4, 96, 1)]
)
async def test_the_vectors_are_in_order_with_the_models_own_count(
    bedrock: StandIn, make: MakeBackend, model: str, count: int, calls: int
) -> None:
    backend = make(model_id=model)
    assert isinstance(backend, BedrockEmbeddings)
    made = await backend.embed(part(model, count))
    assert numbers(made) == expected(count) and made.input_tokens == count * TOKENS_EACH
    assert [operation for _, operation, _ in bedrock.seen] == ["invoke"] * calls
    await wait_idle(backend)


async def test_what_is_sent_is_the_models_own_contract(bedrock: StandIn, make: MakeBackend) -> None:
    await make(model_id=TITAN).embed(part(TITAN, 1, dimensions=256))
    assert bedrock.last == {"modelId": TITAN, "inputText": "1", "dimensions": 256}
    await make(model_id=COHERE_4).embed(part(COHERE_4, 2, dimensions=512, truncate_to=-1))
    assert bedrock.last == {
        "modelId": COHERE_4,
        "texts": ["1", "2"],
        "input_type": "search_document",
        "embedding_types": ["float"],
        "truncate": "END",
        "output_dimension": 512,
    }


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (part(TITAN, 1, (5, 6)), "input"),
        (part(TITAN, 0, Conversation(({"role": "user", "content": "a"},))), "messages"),
        (part(TITAN_1, 1, dimensions=256), "dimensions"),
        (part(COHERE, 1, dimensions=256), "dimensions"),
        (part(TITAN, 1, truncate_to=-1), "truncate_prompt_tokens"),
        (part(COHERE, 1, truncate_to=100), "truncate_prompt_tokens"),
    ],
)
async def test_what_a_model_cannot_do_is_refused_by_its_field_before_any_call(
    bedrock: StandIn, make: MakeBackend, asked: EmbeddingsRequest, param: str
) -> None:
    backend = make(model_id=asked.model)
    assert isinstance(backend, BedrockEmbeddings)
    with pytest.raises(BackendFailure) as caught:
        await backend.embed(asked)
    assert (caught.value.kind, caught.value.param) == (FailureKind.INVALID_INPUT, param)
    assert not bedrock.seen


async def test_the_next_region_makes_the_vectors_when_one_fails(bedrock: StandIn, make: MakeBackend) -> None:
    bedrock.always["us-east-1"] = Behaviour(status=503, error="ServiceUnavailableException")
    backend = make(model_id=COHERE, regions=["us-west-2"])
    assert isinstance(backend, BedrockEmbeddings)
    assert numbers(await backend.embed(part(COHERE))) == expected(3)
    assert bedrock.regions == ["us-east-1", "us-west-2"]


async def test_a_refusal_and_a_call_that_takes_too_long_leave_no_call(
    bedrock: StandIn, make: MakeBackend
) -> None:
    bedrock.script(Behaviour(status=403, error="AccessDeniedException"), Behaviour(hang_before=True))
    for limits, kind in (
        ({}, FailureKind.ACCESS_DENIED),
        ({"total_timeout_seconds": 1}, FailureKind.TIMEOUT),
    ):
        backend = make(model_id=TITAN, **limits)
        assert isinstance(backend, BedrockEmbeddings)
        with pytest.raises(BackendFailure) as caught:
            await backend.embed(part(TITAN))
        assert caught.value.kind is kind
        await wait_idle(backend)


def test_a_model_that_generates_makes_no_vectors(make: MakeBackend) -> None:
    assert not makes_vectors(make(model_id=HAIKU)) and makes_vectors(make(model_id=TITAN))
