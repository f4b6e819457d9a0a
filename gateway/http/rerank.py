"""``/v1/rerank``, ``/v2/rerank`` and ``/v1/score``: scores of texts, by workers."""

from collections.abc import Awaitable
from functools import partial

from gateway.contracts.rerank import (
    RerankAnswerBody,
    RerankBody,
    ScoreAnswer,
    ScoreAnswerBody,
    ScoreBody,
    rerank_body,
    rerank_request,
    score_body,
    score_request,
)
from gateway.http.embeddings import pooled
from gateway.http.exchange import Reply
from gateway.http.generate import origin_of
from gateway.http.idempotency import CallerRequest, CallerRequestDep
from gateway.http.routes import DirectRoute, Json, callers_router

router = callers_router(DirectRoute, 400, 401, 403, 404, 409, 413, 429, 503, 504)


@router.post("/v1/rerank", response_model=RerankAnswerBody)
def rerank(given: Json[RerankBody], call: CallerRequestDep) -> Awaitable[Reply]:
    """The documents in the order of their relevance, with their texts."""
    return _rerank(given, call, documents=True)


@router.post("/v2/rerank", response_model=RerankAnswerBody)
def rerank_v2(given: Json[RerankBody], call: CallerRequestDep) -> Awaitable[Reply]:
    """The documents in the order of their relevance, without texts, as in Cohere's second version."""
    return _rerank(given, call, documents=False)


@router.post("/v1/score", response_model=ScoreAnswerBody)
def score(given: Json[ScoreBody], call: CallerRequestDep) -> Awaitable[Reply]:
    """The scores of pairs of texts."""
    asked = score_request(given, origin_of(call.exchange))

    async def body(answer: ScoreAnswer) -> bytes:
        return score_body(asked, answer)

    return pooled(call, asked, partial(call.exchange.services.embeddings.score, asked), body)


def _rerank(given: RerankBody, call: CallerRequest, *, documents: bool) -> Awaitable[Reply]:
    asked = rerank_request(given, origin_of(call.exchange))

    async def body(answer: ScoreAnswer) -> bytes:
        return rerank_body(given, asked, answer, documents=documents)

    return pooled(call, asked, partial(call.exchange.services.embeddings.score, asked), body)
