"""``/v1/rerank``, ``/v2/rerank`` and ``/v1/score``: scores of texts, by workers."""

from gateway.contracts.rerank import (
    RerankAnswerBody,
    RerankBody,
    ScoreAnswer,
    ScoreAnswerBody,
    ScoreBody,
    ScoreRequest,
    rerank_body,
    rerank_request,
    score_body,
    score_request,
)
from gateway.contracts.values import Caller
from gateway.http.exchange import Exchange, Reply
from gateway.http.generate import in_time, origin_of
from gateway.http.routes import Answering, Asking, DirectRoute, Edge, Json, callers_router
from gateway.ports import Services

router = callers_router(DirectRoute, 400, 401, 403, 404, 413, 429, 503, 504)


@router.post("/v1/rerank", response_model=RerankAnswerBody)
async def rerank(given: Json[RerankBody], services: Edge, exchange: Answering, caller: Asking) -> Reply:
    """The documents in the order of their relevance, with their texts."""
    return await _rerank(given, services, exchange, caller, documents=True)


@router.post("/v2/rerank", response_model=RerankAnswerBody)
async def rerank_v2(given: Json[RerankBody], services: Edge, exchange: Answering, caller: Asking) -> Reply:
    """The documents in the order of their relevance, without texts, as in Cohere's second version."""
    return await _rerank(given, services, exchange, caller, documents=False)


@router.post("/v1/score", response_model=ScoreAnswerBody)
async def score(given: Json[ScoreBody], services: Edge, exchange: Answering, caller: Asking) -> Reply:
    """The scores of pairs of texts."""
    asked = score_request(given, origin_of(services, exchange, caller))
    return Reply(200, score_body(asked, await _scored(services, exchange, asked)))


async def _rerank(
    given: RerankBody, services: Services, exchange: Exchange, caller: Caller, *, documents: bool
) -> Reply:
    asked = rerank_request(given, origin_of(services, exchange, caller))
    answer = await _scored(services, exchange, asked)
    return Reply(200, rerank_body(given, asked, answer, documents=documents))


async def _scored(services: Services, exchange: Exchange, asked: ScoreRequest) -> ScoreAnswer:
    exchange.reported = True
    return await in_time(services, services.embeddings.score(asked))
