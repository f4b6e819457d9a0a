"""``/v1/rerank``, ``/v2/rerank`` and ``/v1/score``: scores of texts, by workers."""

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
from gateway.contracts.values import Caller
from gateway.http.embeddings import pooled
from gateway.http.exchange import Reply
from gateway.http.generate import origin_of
from gateway.http.repeats import Repeatable, Repeats
from gateway.http.routes import AuthenticatedCaller, DirectRoute, Json, Raw, ServicesDep, callers_router
from gateway.ports import Services

router = callers_router(DirectRoute, 400, 401, 403, 404, 409, 413, 429, 503, 504)


@router.post("/v1/rerank", response_model=RerankAnswerBody)
async def rerank(
    given: Json[RerankBody], services: ServicesDep, caller: AuthenticatedCaller, raw: Raw, repeats: Repeats
) -> Reply:
    """The documents in the order of their relevance, with their texts."""
    return await _rerank(given, services, caller, raw, repeats, documents=True)


@router.post("/v2/rerank", response_model=RerankAnswerBody)
async def rerank_v2(
    given: Json[RerankBody], services: ServicesDep, caller: AuthenticatedCaller, raw: Raw, repeats: Repeats
) -> Reply:
    """The documents in the order of their relevance, without texts, as in Cohere's second version."""
    return await _rerank(given, services, caller, raw, repeats, documents=False)


@router.post("/v1/score", response_model=ScoreAnswerBody)
async def score(
    given: Json[ScoreBody], services: ServicesDep, caller: AuthenticatedCaller, raw: Raw, repeats: Repeats
) -> Reply:
    """The scores of pairs of texts."""
    asked = score_request(given, origin_of(services, repeats.exchange, caller))

    async def body(answer: ScoreAnswer) -> bytes:
        return score_body(asked, answer)

    return await pooled(services, raw, repeats, asked, partial(services.embeddings.score, asked), body)


async def _rerank(
    given: RerankBody,
    services: Services,
    caller: Caller,
    raw: bytes,
    repeats: Repeatable,
    *,
    documents: bool,
) -> Reply:
    asked = rerank_request(given, origin_of(services, repeats.exchange, caller))

    async def body(answer: ScoreAnswer) -> bytes:
        return rerank_body(given, asked, answer, documents=documents)

    return await pooled(services, raw, repeats, asked, partial(services.embeddings.score, asked), body)
