"""``/v1/embeddings``: vectors of texts, by workers."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

from gateway.contracts.embeddings import (
    EmbeddingsAnswer,
    EmbeddingsAnswerBody,
    EmbeddingsBody,
    PooledRequest,
    embeddings_body,
    embeddings_request,
)
from gateway.http.exchange import Reply
from gateway.http.generate import in_time, origin_of
from gateway.http.idempotency import CallerRequest, CallerRequestDep
from gateway.http.routes import DirectRoute, Json, callers_router

INLINE_NUMBERS: Final = 65_536
"""Most characters of base64 that are written as numbers on the event loop; 1 MB takes 20 ms."""
INLINE_BASE64: Final = 262_144
"""Most characters of base64 that are written on the event loop: they take less time than a thread."""

T = TypeVar("T")
router = callers_router(DirectRoute, 400, 401, 403, 404, 409, 413, 429, 503, 504)


@router.post("/v1/embeddings", response_model=EmbeddingsAnswerBody)
def embeddings(given: Json[EmbeddingsBody], call: CallerRequestDep) -> Awaitable[Reply]:
    """Vectors of texts or token ids."""
    asked = embeddings_request(given, origin_of(call.exchange))
    ask = partial(call.exchange.services.embeddings.run, asked)
    return pooled(call, asked, ask, lambda answer: vectors_body(answer, given))


def pooled(
    call: CallerRequest,
    asked: PooledRequest,
    ask: Callable[[], Awaitable[T]],
    body: Callable[[T], Awaitable[bytes]],
) -> Awaitable[Reply]:
    """The ``body`` of what workers answer to ``ask``; for a repeated request the stored reply."""
    services = call.exchange.services

    async def run() -> Reply:
        with services.limiter.running(asked.caller):
            call.exchange.reported = True
            answer = await in_time(services, ask())
            call.release()
            return Reply(200, await body(answer))

    return call.once(run, lambda: services.embeddings.may_ask(asked))


async def vectors_body(answer: EmbeddingsAnswer, asked: EmbeddingsBody) -> bytes:
    """The JSON body in the requested format; a large one is written in a thread."""
    floats = asked.encoding_format != "base64"
    if sum(map(len, answer.results)) <= (INLINE_NUMBERS if floats else INLINE_BASE64):
        return embeddings_body(answer, floats=floats)
    return await asyncio.to_thread(embeddings_body, answer, floats=floats)
