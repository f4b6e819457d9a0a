"""``/admin/prompts`` and ``/admin/budget/preview``: registered prompt versions, and what would be sent."""

from __future__ import annotations

import orjson
from starlette.types import Receive, Scope

from gateway.contracts.native import NativeRequest, to_request
from gateway.contracts.native_answer import error_json
from gateway.contracts.openai import ChatRequest, chat_request
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import parse
from gateway.contracts.values import CallerRole, GenerateRequest
from gateway.errors import UnknownPromptVersion
from gateway.http.body import read_body
from gateway.http.disconnect_watch import run_until_gone
from gateway.http.endpoint import Endpoint, require_role
from gateway.http.exchange import Exchange, Reply
from gateway.http.generate import origin_of
from gateway.ports import Services


class NoSuchPrompt(UnknownPromptVersion):
    """The path names a prompt version that is not registered."""

    status = 404


def prompt_pages(services: Services) -> dict[str, Endpoint]:
    """What is read with GET, by path; for operators and admins."""

    async def listed(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        require_role(services, exchange, CallerRole.OPERATOR)
        return Reply(200, orjson.dumps({"prompts": services.prompts.versions()}))

    async def one(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        require_role(services, exchange, CallerRole.OPERATOR)
        try:
            found = services.prompts.version(scope["path_params"]["id"])
        except UnknownPromptVersion as error:
            raise NoSuchPrompt(error.message, param="id") from None
        return Reply(200, orjson.dumps(found))

    return {
        "/admin/prompts": Endpoint(listed, error_json),
        "/admin/prompts/{id}": Endpoint(one, error_json),
    }


def budget_preview(services: Services) -> dict[str, Endpoint]:
    """What is posted, by path; for operators and admins. Generates nothing and bills nothing."""

    async def preview(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        caller = require_role(services, exchange, CallerRole.OPERATOR)
        body = await read_body(exchange, receive, services.limits.max_body_bytes)
        request = preview_request(body, origin_of(services, exchange, caller))
        found = await run_until_gone(services.prompts.preview(request), exchange, receive, services.clock)
        return Reply(200, orjson.dumps(found))

    return {"/admin/budget/preview": Endpoint(preview, error_json)}


def preview_request(body: bytes, origin: RequestOrigin) -> GenerateRequest:
    """The request of a preview's body: a native one, or OpenAI's chat under the only key ``openai``.

    Raises:
        InvalidRequest: what the contract would refuse; InvalidJson for what is no JSON.
    """
    chat = _chat_of(body)
    if chat is not None:
        return chat_request(parse(ChatRequest, chat), origin).request
    return to_request(parse(NativeRequest, body), origin)


def _chat_of(body: bytes) -> bytes | None:
    """The body under ``openai``; ``None`` for a native body, and for what the native contract will refuse."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if isinstance(data, dict) and set(data) == {"openai"}:
        return orjson.dumps(data["openai"])
    return None
