"""``/v1/models``: the models that a key may use, in the format of each contract's clients."""

from hashlib import blake2b
from typing import Annotated, Literal

import orjson
from fastapi import Depends, Header, Query, Request, Response
from typing_extensions import TypedDict

from gateway.contracts.fields import from_attributes
from gateway.contracts.messages.answer import MessagesErrorBody
from gateway.contracts.model_card import ModelCard
from gateway.contracts.model_lists import (
    AnthropicModel,
    AnthropicModels,
    anthropic_model,
    anthropic_models,
    codex_model,
)
from gateway.contracts.openai_answer import OpenAIErrorBody
from gateway.contracts.refusals import path_of
from gateway.errors import UnknownModel
from gateway.http.exchange import Exchange
from gateway.http.respond import json_of
from gateway.http.routes import CallerRoute, ExchangeDep, callers_router, errors
from gateway.ports import Services


class ModelBody(TypedDict):
    """OpenAI's model object with vLLM's fields; ``counted_by`` describes how prompts' tokens are counted.

    ``pooling`` is how the engine in process makes vectors from hidden states: ``mean``. It is null for other
    models: their workers decide that, if they make vectors at all.
    """

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    counted_by: str
    pooling: str | None


class ModelListBody(TypedDict):
    """OpenAI's list of models; ``sluice_role``, for another Sluice, is the role of the caller's key."""

    object: str
    sluice_role: str
    data: list[ModelBody]


_Error = OpenAIErrorBody | MessagesErrorBody
router = callers_router(CallerRoute, 401, prefix="/v1/models", model=_Error)


async def _is_anthropic(
    request: Request,
    anthropic_version: Annotated[str | None, Header(description="Asks for Anthropic's shape.")] = None,
) -> bool:
    """Whether the client uses Anthropic's contract; such clients send ``anthropic-version``."""
    return Exchange.of(request.scope).is_anthropic


IsAnthropic = Annotated[bool, Depends(_is_anthropic)]


Lifecycles = Annotated[
    list[Literal["active", "deprecated", "retired"]], Query(default_factory=list, alias="lifecycle[]")
]


@router.get("", response_model=ModelListBody | AnthropicModels)
async def list_models(
    exchange: ExchangeDep,
    request: Request,
    is_anthropic: IsAnthropic,
    lifecycle: Lifecycles,
    client_version: str | None = None,
    limit: Annotated[int | None, Query(ge=1, le=1_000, description="Of Anthropic's list; default 20")] = None,
    after_id: str | None = None,
    before_id: str | None = None,
) -> ModelListBody | Response:
    """All served models. With the header ``anthropic-version``, or a parameter of Anthropic's list, a page of
    that list instead; with ``client_version``, Codex's list in addition.
    """
    services, created = exchange.services, request.app.state.created
    cards = services.models(exchange.known_caller)
    if is_anthropic or lifecycle or (limit, after_id, before_id) != (None, None, None):
        listed = cards if not lifecycle or "active" in lifecycle else ()  # all served models are active
        return json_of(anthropic_models(listed, created, 20 if limit is None else limit, after_id, before_id))
    data = [_body(card, created, services) for card in cards]
    body: ModelListBody = {"object": "list", "sluice_role": exchange.known_caller.role.value, "data": data}
    if client_version is None:
        return body
    models = [codex_model(card, place) for place, card in enumerate(cards)]
    answer = json_of({**body, "models": models})
    tag = blake2b(orjson.dumps(models), digest_size=8).hexdigest()
    answer.headers.update({"etag": f'"{tag}"', "x-models-etag": f'"{tag}"'})
    return answer


@router.get("/{id:path}", response_model=ModelBody | AnthropicModel, responses=errors(404, model=_Error))
async def show_model(
    id: str, exchange: ExchangeDep, request: Request, is_anthropic: IsAnthropic
) -> ModelBody | Response:
    """One served model; its id may contain slashes."""
    card, created = card_of(exchange, id), request.app.state.created
    return (
        json_of(anthropic_model(card, created)) if is_anthropic else _body(card, created, exchange.services)
    )


def card_of(exchange: Exchange, model: str) -> ModelCard:
    """The card of a served model. Raises UnknownModel: nothing of that name is served to this caller."""
    for card in exchange.services.models(exchange.known_caller):
        if card.id == model:
            return card
    name = path_of([model])
    raise UnknownModel(f"model '{name}' is not served; GET /v1/models lists the served models", param="model")


def _body(card: ModelCard, created: int, services: Services) -> ModelBody:
    encoder = services.text(card.parent or card.root).tokenizer.encoder
    return from_attributes(
        ModelBody, card, object="model", created=created, owned_by="sluice", counted_by=encoder
    )
