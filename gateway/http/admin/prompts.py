"""``/admin/prompts`` and ``/admin/budget/preview``: registered prompt versions, and what would be sent."""

from typing import Annotated

import orjson
from fastapi import APIRouter, Request
from pydantic import BeforeValidator
from typing_extensions import TypedDict

from gateway.admin.prompts import PreviewBody, PromptBody, PromptListed
from gateway.contracts.fields import Body
from gateway.contracts.native import NativeRequest, to_request
from gateway.contracts.openai import ChatRequest, chat_request
from gateway.contracts.refusals import parse
from gateway.errors import UnknownPromptVersion
from gateway.http.exchange import Exchange
from gateway.http.generate import origin_of
from gateway.http.routes import OPERATORS, Asking, Edge, OperatorRoute


class NoSuchPrompt(UnknownPromptVersion, status=404, code="unknown_prompt_version"):
    """The path names a prompt version that is not registered."""


class PreviewRoute(OperatorRoute):
    """A preview changes nothing, so it ends when the operator leaves."""

    ends_with_caller = frozenset({"GET", "POST"})


class PromptsBody(TypedDict):
    """By id."""

    prompts: list[PromptListed]


class ChatPreview(Body):
    """OpenAI's chat request under its only key."""

    openai: ChatRequest


def _preview(raw: bytes) -> NativeRequest | ChatPreview:
    """A native request, or OpenAI's chat under the only key ``openai``; refused as its contract does."""
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        data = None
    if isinstance(data, dict) and set(data) == {"openai"}:
        return ChatPreview.model_construct(openai=parse(ChatRequest, orjson.dumps(data["openai"])))
    return parse(NativeRequest, raw)


router = APIRouter(prefix="/admin", route_class=PreviewRoute, **OPERATORS)


@router.get("/prompts")
async def list_prompts(services: Edge) -> PromptsBody:
    """Registered prompt versions."""
    return {"prompts": services.prompts.versions()}


@router.get("/prompts/{id}")
async def show_prompt(id: str, services: Edge) -> PromptBody:
    """One prompt version."""
    try:
        return services.prompts.version(id)
    except UnknownPromptVersion as error:
        raise NoSuchPrompt(error.message, param="id") from None


@router.post("/budget/preview")
async def preview_budget(
    given: Annotated[NativeRequest | ChatPreview, BeforeValidator(_preview)],
    request: Request,
    services: Edge,
    caller: Asking,
) -> PreviewBody:
    """What would be sent for a request; generates nothing and bills nothing."""
    origin = origin_of(services, Exchange.of(request.scope), caller)
    if isinstance(given, ChatPreview):
        return await services.prompts.preview(chat_request(given.openai, origin).request)
    return await services.prompts.preview(to_request(given, origin))
