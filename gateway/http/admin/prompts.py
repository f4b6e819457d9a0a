"""``/admin/prompts`` and ``/admin/budget/preview``: prompt versions, and the prompt of a request."""

from typing import Annotated

import orjson
from fastapi import APIRouter
from pydantic import BeforeValidator
from typing_extensions import TypedDict

from gateway.admin.prompts import PreviewBody, PromptBody, PromptListed
from gateway.contracts.fields import Body
from gateway.contracts.native import NativeRequest, to_request
from gateway.contracts.openai import ChatRequest, chat_request
from gateway.contracts.refusals import parse
from gateway.errors import UnknownPromptVersion
from gateway.http.generate import origin_of
from gateway.http.routes import OPERATORS, CancellableRoute, ExchangeDep, ServicesDep


class NoSuchPrompt(UnknownPromptVersion, status=404, code="unknown_prompt_version"):
    """The path names a prompt version that is not registered."""


class PromptsBody(TypedDict):
    """The registered prompt versions, ordered by id."""

    prompts: list[PromptListed]


class ChatPreview(Body):
    """A body with OpenAI's chat request as its only field."""

    openai: ChatRequest


def _preview(raw: bytes) -> NativeRequest | ChatPreview:
    """Parse a native request, or OpenAI's chat in the only field ``openai``; raises as its contract does."""
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        data = None
    if isinstance(data, dict) and set(data) == {"openai"}:
        return ChatPreview.model_construct(openai=parse(ChatRequest, orjson.dumps(data["openai"])))
    return parse(NativeRequest, raw)


router = APIRouter(prefix="/admin", route_class=CancellableRoute, **OPERATORS)


@router.get("/prompts")
async def list_prompts(services: ServicesDep) -> PromptsBody:
    """Registered prompt versions."""
    return {"prompts": services.prompts.versions()}


@router.get("/prompts/{id}")
async def show_prompt(id: str, services: ServicesDep) -> PromptBody:
    """One prompt version."""
    try:
        return services.prompts.version(id)
    except UnknownPromptVersion as error:
        raise NoSuchPrompt(error.message, param="id") from None


@router.post("/budget/preview")
async def preview_budget(
    given: Annotated[NativeRequest | ChatPreview, BeforeValidator(_preview)], exchange: ExchangeDep
) -> PreviewBody:
    """The prompt that would be sent for a request; generates nothing and bills nothing."""
    origin = origin_of(exchange)
    if isinstance(given, ChatPreview):
        return await exchange.services.prompts.preview(chat_request(given.openai, origin).request)
    return await exchange.services.prompts.preview(to_request(given, origin))
