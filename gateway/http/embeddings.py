"""``/v1/embeddings``: vectors of texts, by workers."""

import asyncio
from typing import Final

from fastapi import APIRouter, Request, Response

from gateway.contracts.embeddings import (
    EmbeddingsAnswerBody,
    EmbeddingsBody,
    embeddings_body,
    embeddings_request,
)
from gateway.contracts.openai_answer import OpenAIErrorBody
from gateway.http.exchange import Exchange, Reply
from gateway.http.generate import in_time, origin_of
from gateway.http.respond import response_of
from gateway.http.routes import KEY, Asking, CountedRoute, Edge, Json, errors

INLINE_CHARS: Final = 65_536
"""Vectors of more base64 are written in a thread: numbers take the loop 10 ms a megabyte."""

router = APIRouter(
    tags=["openai"],
    route_class=CountedRoute,
    dependencies=[KEY],
    responses=errors(400, 401, 403, 404, 413, 429, 503, 504, model=OpenAIErrorBody),
)


@router.post("/v1/embeddings", response_model=EmbeddingsAnswerBody)
async def embeddings(
    given: Json[EmbeddingsBody], request: Request, services: Edge, caller: Asking
) -> Response:
    """Vectors of texts or token ids."""
    exchange = Exchange.of(request.scope)
    asked = embeddings_request(given, origin_of(services, exchange, caller))
    exchange.reported = True
    answer = await in_time(services, services.embeddings.run(asked))
    floats, size = given.encoding_format == "float", sum(map(len, answer.vectors))
    if size <= INLINE_CHARS:
        return response_of(Reply(200, embeddings_body(answer, floats=floats)))
    body = await asyncio.to_thread(embeddings_body, answer, floats=floats)
    return response_of(Reply(200, body))
