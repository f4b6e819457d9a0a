"""Counts a prompt's tokens as its answer's usage would: ``/v1/messages/count_tokens`` and
``/v1/responses/input_tokens``.

Requests count against the key's limits as those of ``/tokenize`` do.
"""

from fastapi import Request
from typing_extensions import TypedDict

from gateway.contracts.messages.answer import MessagesErrorBody
from gateway.contracts.messages.body import CountRequest
from gateway.contracts.messages.request import counted_request
from gateway.contracts.responses.body import ResponsesBody
from gateway.contracts.values import Caller, GenerateRequest
from gateway.http.exchange import Exchange
from gateway.http.generate import in_time, origin_of
from gateway.http.responses import asked_of
from gateway.http.routes import AuthenticatedCaller, CountedRoute, Json, ServicesDep, callers_router
from gateway.http.tokenize import BYTES_PER_TOKEN
from gateway.ports import Services


class MessageTokens(TypedDict):
    """The number of tokens of the whole prompt, cached or not."""

    input_tokens: int


class ResponseTokens(TypedDict):
    """The number of tokens of the whole prompt, cached or not."""

    object: str
    input_tokens: int


router = callers_router(
    CountedRoute, 400, 401, 403, 404, 413, 429, 504, tag="anthropic", model=MessagesErrorBody
)
responses = callers_router(CountedRoute, 400, 401, 403, 404, 413, 429, 504)


@router.post("/v1/messages/count_tokens")
async def count_tokens(
    given: Json[CountRequest], request: Request, services: ServicesDep, caller: AuthenticatedCaller
) -> MessageTokens:
    """The number of tokens of a prompt."""
    asked = counted_request(given, origin_of(services, Exchange.of(request.scope), caller))
    return {"input_tokens": await _counted(asked, request, services, caller)}


@responses.post("/v1/responses/input_tokens")
async def input_tokens(
    given: Json[ResponsesBody], request: Request, services: ServicesDep, caller: AuthenticatedCaller
) -> ResponseTokens:
    """The number of tokens of a prompt; the body is that of ``/v1/responses``."""
    asked = await asked_of(services, given, origin_of(services, Exchange.of(request.scope), caller))
    count = await _counted(asked.request, request, services, caller)
    return {"object": "response.input_tokens", "input_tokens": count}


async def _counted(asked: GenerateRequest, request: Request, services: Services, caller: Caller) -> int:
    await services.limiter.spend(caller, len(await request.body()) // BYTES_PER_TOKEN)
    return await in_time(services, services.prompts.count(asked, services.text_threads.of(asked)))
