"""``/tokenize`` and ``/detokenize``: the served model's tokenizer, asked directly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson
from starlette.types import Receive, Scope

from gateway.contracts.openai import to_message
from gateway.contracts.openai_answer import error_json
from gateway.contracts.refusals import parse
from gateway.contracts.tokenizing import DetokenizeBody, DetokenizeRequest, TokenizeBody, TokenizeRequest
from gateway.contracts.turns import check_count
from gateway.contracts.values import Caller
from gateway.errors import InvalidRequest
from gateway.http.body import read_body
from gateway.http.disconnect_watch import run_until_gone
from gateway.http.endpoint import Endpoint, Handler, caller_of
from gateway.http.exchange import Exchange, Reply
from gateway.http.idempotency import Idempotency, ReplayableReply, fingerprint_of, key_of
from gateway.http.openai import card_of
from gateway.ports import Services
from gateway.prompts.text_port import TextService

Answering = Callable[[Services, Caller, bytes], Awaitable[bytes]]


def tokenizing(services: Services, idempotency: Idempotency) -> dict[str, Endpoint]:
    """The endpoints by path."""
    answers: dict[str, Answering] = {"/tokenize": _tokenize, "/detokenize": _detokenize}
    return {
        path: Endpoint(_handler(services, idempotency, answer), error_json)
        for path, answer in answers.items()
    }


def _handler(services: Services, idempotency: Idempotency, answer: Answering) -> Handler:
    async def handle(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        caller = caller_of(services, exchange)
        body = await read_body(exchange, receive, services.limits.max_body_bytes)
        key = key_of(exchange.headers.get(b"idempotency-key"))

        async def run() -> ReplayableReply:
            return ReplayableReply(Reply(200, await answer(services, caller, body)), keep=True)

        if key is None:
            return (await run()).reply
        fingerprint = fingerprint_of(scope["path"], body)
        once = idempotency.once(caller.tenant, key, fingerprint, run)
        return await run_until_gone(once, exchange, receive, services.clock)

    return handle


async def _tokenize(services: Services, caller: Caller, body: bytes) -> bytes:
    request = parse(TokenizeRequest, body)
    if request.model is not None:
        card_of(services, caller, request.model)
    text = services.text()
    tokens = await _encode(services, text, request)
    answer: TokenizeBody = {
        "count": len(tokens),
        "max_model_len": text.max_model_len,
        "tokens": list(tokens),
        "token_strs": text.tokens(tokens) if request.return_token_strs else None,
    }
    return orjson.dumps(answer)


async def _encode(services: Services, text: TextService, request: TokenizeRequest) -> tuple[int, ...]:
    """A text gets its special tokens unless told otherwise; a chat template writes its own."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("one of prompt and messages is needed; allowed: exactly one", param="prompt")
    if request.prompt is not None:
        if request.add_generation_prompt is not None:
            raise InvalidRequest(
                "add_generation_prompt is given with prompt; allowed: with messages",
                param="add_generation_prompt",
            )
        return await text.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    if request.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens is true with messages; allowed: false, the chat template writes its own",
            param="add_special_tokens",
        )
    messages = request.messages or []
    check_count(len(messages), services.limits.max_messages)
    return await text.encode_chat(
        [to_message(one) for one in messages],
        add_generation_prompt=request.add_generation_prompt is not False,
    )


async def _detokenize(services: Services, caller: Caller, body: bytes) -> bytes:
    request = parse(DetokenizeRequest, body)
    if request.model is not None:
        card_of(services, caller, request.model)
    try:
        prompt = await services.text().decode(request.tokens)
    except ValueError:
        raise InvalidRequest(
            "tokens has an id outside the vocabulary; allowed: ids of the served model", param="tokens"
        ) from None
    answer: DetokenizeBody = {"prompt": prompt}
    return orjson.dumps(answer)
