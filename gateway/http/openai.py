"""OpenAI's paths: chat, text completions, and the list of models."""

from __future__ import annotations

import orjson
from starlette.types import Receive, Scope
from typing_extensions import TypedDict

from gateway.contracts.model_card import ModelCard
from gateway.contracts.openai_answer import error_json
from gateway.contracts.openai_stream import ChatDialect, CompletionDialect
from gateway.contracts.refusals import path_of
from gateway.contracts.values import Caller
from gateway.errors import UnknownModel
from gateway.http.endpoint import Endpoint, caller_of
from gateway.http.exchange import Exchange, Reply
from gateway.http.generate import GenerationEndpoint
from gateway.http.idempotency import Idempotency
from gateway.ports import Services


class ModelBody(TypedDict):
    """OpenAI's model object, with the fields that vLLM adds."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelListBody(TypedDict):
    """OpenAI's list of models."""

    object: str
    data: list[ModelBody]


def completions(services: Services, idempotency: Idempotency) -> dict[str, GenerationEndpoint]:
    """The generating endpoints by path."""
    return {
        "/v1/chat/completions": GenerationEndpoint(services, ChatDialect(), idempotency),
        "/v1/completions": GenerationEndpoint(services, CompletionDialect(), idempotency),
    }


def models(services: Services) -> dict[str, Endpoint]:
    """The endpoints by path; a model's id may contain slashes."""
    created = int(services.unix_time())

    async def listed(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        cards = services.models(caller_of(services, exchange))
        body: ModelListBody = {"object": "list", "data": [_body(card, created) for card in cards]}
        return Reply(200, orjson.dumps(body))

    async def one(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        caller = caller_of(services, exchange)
        card = card_of(services, caller, scope["path_params"]["id"])
        return Reply(200, orjson.dumps(_body(card, created)))

    return {"/v1/models": Endpoint(listed, error_json), "/v1/models/{id:path}": Endpoint(one, error_json)}


def card_of(services: Services, caller: Caller, model: str) -> ModelCard:
    """The card of a served model.

    Raises:
        UnknownModel: nothing of that name is served to this caller.
    """
    for card in services.models(caller):
        if card.id == model:
            return card
    name = path_of([model])
    raise UnknownModel(f"model '{name}' is not served; GET /v1/models lists what is", param="model")


def _body(card: ModelCard, created: int) -> ModelBody:
    return {
        "id": card.id,
        "object": "model",
        "created": created,
        "owned_by": "sluice",
        "root": card.root,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
    }
