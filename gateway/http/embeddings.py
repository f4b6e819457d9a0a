"""``/v1/embeddings``: vectors of texts, by workers."""

import asyncio
from typing import Final

from fastapi import APIRouter

from gateway.contracts.embeddings import (
    EmbeddingsAnswer,
    EmbeddingsAnswerBody,
    EmbeddingsBody,
    embeddings_body,
    embeddings_request,
)
from gateway.contracts.openai_answer import OpenAIErrorBody
from gateway.http.exchange import Reply
from gateway.http.generate import in_time, origin_of
from gateway.http.repeats import Repeats
from gateway.http.routes import KEY, AuthenticatedCaller, DirectRoute, Json, Raw, ServicesDep, errors

INLINE_NUMBERS: Final = 65_536
"""Most characters of base64 that are written as numbers on the event loop; 1 MB takes 20 ms."""
INLINE_BASE64: Final = 262_144
"""Most characters of base64 that are written on the event loop: they take less time than a thread."""

router = APIRouter(
    tags=["openai"],
    route_class=DirectRoute,
    dependencies=[KEY],
    responses=errors(400, 401, 403, 404, 409, 413, 429, 503, 504, model=OpenAIErrorBody),
)


@router.post("/v1/embeddings", response_model=EmbeddingsAnswerBody)
async def embeddings(
    given: Json[EmbeddingsBody],
    services: ServicesDep,
    caller: AuthenticatedCaller,
    raw: Raw,
    repeats: Repeats,
) -> Reply:
    """Vectors of texts or token ids."""
    asked = embeddings_request(given, origin_of(services, repeats.exchange, caller))

    async def run() -> Reply:
        with services.limiter.running(caller):
            repeats.exchange.reported = True
            answer = await in_time(services, services.embeddings.run(asked))
            repeats.release()
            return Reply(200, await vectors_body(answer, given))

    return await repeats.once(raw, run, lambda: services.embeddings.may_ask(asked))


async def vectors_body(answer: EmbeddingsAnswer, asked: EmbeddingsBody) -> bytes:
    """The JSON body in the requested format; a large one is written in a thread."""
    floats = asked.encoding_format == "float"
    if sum(map(len, answer.vectors)) <= (INLINE_NUMBERS if floats else INLINE_BASE64):
        return embeddings_body(answer, floats=floats)
    return await asyncio.to_thread(embeddings_body, answer, floats=floats)
