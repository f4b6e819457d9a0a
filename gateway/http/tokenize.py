"""``/tokenize`` and ``/detokenize``: direct access to the served model's tokenizer. And the number of tokens
that an answer's usage would have: ``/v1/messages/count_tokens`` and ``/v1/responses/input_tokens``.

Nothing is generated, so an ``Idempotency-Key`` has no effect. A request counts against the key's limits: as a
request, and as tokens by the size of its body. A body that would block the event loop for too long is
tokenized in the tenant's share of the threads.
"""

from collections.abc import Callable
from typing import Final

import orjson
from fastapi import Request, Response
from typing_extensions import TypedDict

from budgeting.plan import INLINE_CHARS
from budgeting.template import CONTINUES
from gateway.contracts.checks import check_count, check_latest
from gateway.contracts.images import refuse_images
from gateway.contracts.messages.answer import MessagesErrorBody
from gateway.contracts.messages.body import CountRequest
from gateway.contracts.messages.request import counted_request
from gateway.contracts.model_card import CardKind
from gateway.contracts.openai import to_messages
from gateway.contracts.refusals import not_allowed
from gateway.contracts.responses.body import ResponsesBody
from gateway.contracts.tokenizing import DetokenizeBody, DetokenizeRequest, TokenizeBody, TokenizeRequest
from gateway.contracts.tools import chat_ending, template_kwargs, to_tools
from gateway.contracts.values import GenerateRequest
from gateway.errors import InvalidRequest
from gateway.http.exchange import Exchange
from gateway.http.generate import in_time, origin_of
from gateway.http.models import card_of
from gateway.http.responses import asked_of
from gateway.http.routes import CountedRoute, Json, callers_router
from gateway.prompts.text import ModelText

BYTES_PER_TOKEN: Final = 64
"""Bytes of a body that count as one token of the key's limits. A token of text has about 4 bytes, but
tokenizing costs far less than generating, and callers often send the counted prompt afterwards."""

ITEMS_AT_ONCE: Final = 16_384
"""Items of a list that are written as JSON at a time; no other thread runs for that half millisecond."""

Tokenized = TokenizeBody | DetokenizeBody

router = callers_router(CountedRoute, 400, 401, 404, 413, 429, 503)


@router.post("/tokenize", response_model=TokenizeBody)
async def tokenize(given: Json[TokenizeRequest], request: Request) -> Response:
    """Convert a text or messages to token ids."""
    most = Exchange.of(request.scope).services.limits.max_messages
    return await _answer(request, given.model, lambda text: _tokenized(text, given, most))


@router.post("/detokenize", response_model=DetokenizeBody)
async def detokenize(given: Json[DetokenizeRequest], request: Request) -> Response:
    """Convert token ids to text."""
    return await _answer(request, given.model, lambda text: _text_of(text, given))


async def _answer(request: Request, model: str | None, work: Callable[[ModelText], Tokenized]) -> Response:
    exchange = Exchange.of(request.scope)
    services, caller = exchange.services, exchange.known_caller
    text = services.text(_base_model(exchange, model))
    size = len(await request.body())
    await services.limiter.spend(caller, size // BYTES_PER_TOKEN)

    def answer() -> bytes:
        return orjson.dumps({name: _in_parts(value) for name, value in work(text).items()})

    if size <= INLINE_CHARS and not text.blocks:
        body = answer()
    else:
        body = await in_time(services, services.text_threads.run(caller.tenant, size, answer))
    return Response(body, media_type="application/json")


def _base_model(exchange: Exchange, model: str | None) -> str:
    """The base model whose tokenizer is used; without a name the only one, or ``""`` for the engine's."""
    if model is not None:
        card = card_of(exchange, model)
        return card.parent or card.root
    bases = {one.root for one in exchange.services.models(exchange.known_caller) if one.kind is CardKind.BASE}
    return bases.pop() if len(bases) == 1 else ""


def _in_parts(value: object) -> object:
    """A long list as JSON, written in parts so that other threads can run between them."""
    if not isinstance(value, list | tuple) or len(value) <= ITEMS_AT_ONCE:
        return value
    starts = range(0, len(value), ITEMS_AT_ONCE)
    parts = [orjson.dumps(value[start : start + ITEMS_AT_ONCE])[1:-1] for start in starts]
    return orjson.Fragment(b"[" + b",".join(parts) + b"]")


def _tokenized(text: ModelText, request: TokenizeRequest, max_messages: int) -> TokenizeBody:
    tokens = _encode(text, request, max_messages)
    try:
        strings = text.tokenizer.tokens(tokens) if request.return_token_strs else None
    except ValueError as error:
        raise not_allowed("return_token_strs", f"is true, but {error}", "false for this model") from None
    return {
        "count": len(tokens),
        "max_model_len": text.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


def _encode(text: ModelText, request: TokenizeRequest, max_messages: int) -> tuple[int, ...]:
    """Encode the prompt, by default with special tokens, or the messages, by the chat template."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("one of prompt and messages is needed; allowed: exactly one", param="prompt")
    if request.prompt is not None:
        for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
            if getattr(request, name) not in (None, False, [], {}):
                raise not_allowed(name, "is given with prompt", "with messages")
        return text.tokenizer.encode(
            request.prompt, add_special_tokens=request.add_special_tokens is not False
        )
    if request.add_special_tokens:
        raise not_allowed(
            "add_special_tokens", "is true with messages", "false, since the chat template adds its own"
        )
    messages = request.messages or []
    check_count(len(messages), max_messages)
    ending = chat_ending(continues=request.continue_final_message, generates=request.add_generation_prompt)
    shown = to_messages(messages)[0]
    if CONTINUES in ending:
        check_latest(shown, continued=True)
    return text.encode_chat(
        refuse_images(shown),
        tools=to_tools(request.tools or ()),
        kwargs={**template_kwargs(request.chat_template_kwargs), **ending},
    )


def _text_of(text: ModelText, request: DetokenizeRequest) -> DetokenizeBody:
    try:
        return {"prompt": text.tokenizer.decode(request.tokens)}
    except ValueError:
        raise not_allowed("tokens", "has an id outside the vocabulary", "ids of the served model") from None


class MessageTokens(TypedDict):
    """The number of tokens of the whole prompt, cached or not."""

    input_tokens: int


class ResponseTokens(MessageTokens):
    """The number of tokens of the whole prompt, cached or not."""

    object: str


messages = callers_router(
    CountedRoute, 400, 401, 403, 404, 413, 429, 504, tag="anthropic", model=MessagesErrorBody
)
responses = callers_router(CountedRoute, 400, 401, 403, 404, 413, 429, 504)


@messages.post("/v1/messages/count_tokens")
async def count_tokens(given: Json[CountRequest], request: Request) -> MessageTokens:
    """The number of tokens of a prompt."""
    exchange = Exchange.of(request.scope)
    asked = counted_request(given, origin_of(exchange))
    return {"input_tokens": await _counted(asked, request, exchange)}


@responses.post("/v1/responses/input_tokens")
async def input_tokens(given: Json[ResponsesBody], request: Request) -> ResponseTokens:
    """The number of tokens of a prompt; the body is that of ``/v1/responses``."""
    exchange = Exchange.of(request.scope)
    asked = await asked_of(exchange.services, given, origin_of(exchange))
    count = await _counted(asked.request, request, exchange)
    return {"object": "response.input_tokens", "input_tokens": count}


async def _counted(asked: GenerateRequest, request: Request, exchange: Exchange) -> int:
    services = exchange.services
    await services.limiter.spend(exchange.known_caller, len(await request.body()) // BYTES_PER_TOKEN)
    return await in_time(services, services.prompts.count(asked, services.text_threads.of(asked)))
