"""``/tokenize`` and ``/detokenize``: the served model's tokenizer, asked directly."""

from collections.abc import Awaitable, Callable

import orjson
from fastapi import APIRouter, Request, Response

from gateway.contracts.checks import check_count
from gateway.contracts.openai import to_message
from gateway.contracts.openai_answer import OpenAIErrorBody
from gateway.contracts.refusals import not_allowed
from gateway.contracts.tokenizing import DetokenizeBody, DetokenizeRequest, TokenizeBody, TokenizeRequest
from gateway.contracts.values import Caller
from gateway.errors import InvalidRequest
from gateway.http.exchange import Exchange, Reply
from gateway.http.idempotency import Idempotency, ReplayableReply, fingerprint_of, key_of
from gateway.http.models import card_of
from gateway.http.respond import response_of
from gateway.http.routes import KEY, Asking, CallerRoute, Edge, Json, Replays, errors
from gateway.ports import Services
from gateway.prompts.text import TextService

Tokenized = TokenizeBody | DetokenizeBody

router = APIRouter(
    tags=["openai"],
    route_class=CallerRoute,
    dependencies=[KEY],
    responses=errors(400, 401, 404, 409, 413, 503, model=OpenAIErrorBody),
)


@router.post("/tokenize", response_model=TokenizeBody)
async def tokenize(
    given: Json[TokenizeRequest], request: Request, services: Edge, caller: Asking, replays: Replays
) -> Response:
    """Text to token ids."""
    return await _once(request, caller, replays, lambda: _tokenized(services, caller, given))


@router.post("/detokenize", response_model=DetokenizeBody)
async def detokenize(
    given: Json[DetokenizeRequest], request: Request, services: Edge, caller: Asking, replays: Replays
) -> Response:
    """Token ids to text."""
    return await _once(request, caller, replays, lambda: _text_of(services, caller, given))


async def _once(
    request: Request,
    caller: Caller,
    replays: Idempotency,
    work: Callable[[], Awaitable[Tokenized]],
) -> Response:
    async def run() -> ReplayableReply:
        return ReplayableReply(Reply(200, orjson.dumps(await work())), keep=True)

    key = key_of(Exchange.of(request.scope).headers.get(b"idempotency-key"))
    if key is None:
        return response_of((await run()).reply)
    fingerprint = fingerprint_of(request.url.path, await request.body())
    return response_of(await replays.once(caller.tenant, key, fingerprint, run))


async def _tokenized(services: Services, caller: Caller, request: TokenizeRequest) -> TokenizeBody:
    if request.model is not None:
        card_of(services, caller, request.model)
    text = services.text()
    tokens = await _encode(services, text, request)
    return {
        "count": len(tokens),
        "max_model_len": text.max_model_len,
        "tokens": list(tokens),
        "token_strs": text.tokens(tokens) if request.return_token_strs else None,
    }


async def _encode(services: Services, text: TextService, request: TokenizeRequest) -> tuple[int, ...]:
    """A text gets its special tokens unless the request says otherwise; a chat template writes its own."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("one of prompt and messages is needed; allowed: exactly one", param="prompt")
    if request.prompt is not None:
        if request.add_generation_prompt is not None:
            raise not_allowed("add_generation_prompt", "is given with prompt", "with messages")
        return await text.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    if request.add_special_tokens:
        raise not_allowed(
            "add_special_tokens", "is true with messages", "false, the chat template writes its own"
        )
    messages = request.messages or []
    check_count(len(messages), services.limits.max_messages)
    return await text.encode_chat(
        [to_message(one) for one in messages],
        add_generation_prompt=request.add_generation_prompt is not False,
    )


async def _text_of(services: Services, caller: Caller, request: DetokenizeRequest) -> DetokenizeBody:
    if request.model is not None:
        card_of(services, caller, request.model)
    try:
        return {"prompt": await services.text().decode(request.tokens)}
    except ValueError:
        raise not_allowed("tokens", "has an id outside the vocabulary", "ids of the served model") from None
