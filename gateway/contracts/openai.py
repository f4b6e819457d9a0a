"""OpenAI's requests (chat and text completions) with vLLM's extensions, and their conversion."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec.structs import replace
from pydantic import AfterValidator, Field

from budgeting.template import CONTINUES, GENERATES
from budgeting.values import Message
from gateway.contracts import openai_fields
from gateway.contracts.checks import check_count, check_latest, prompts_of, with_latest_turn
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.features import Feature
from gateway.contracts.fields import (
    MAX_TOKENS,
    Listed,
    MaxTokens,
    Prompts,
    Text,
    TextOr,
    label_or_none,
)
from gateway.contracts.images import ImageUrlBody, PartBody, read_content, with_parts
from gateway.contracts.native import NO_FIELDS, build_request
from gateway.contracts.openai_body import MessagePart, OpenAIBody, check_known
from gateway.contracts.openai_sampling import MAX_LOGPROBS, sampling_of, shape_of
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.plain_chat import FIELDS, ROLES
from gateway.contracts.refusals import not_allowed, required
from gateway.contracts.tool_fields import CallFields, ToolFields
from gateway.contracts.tools import chat_ending, holds_calls, message_of, tool_request
from gateway.contracts.values import EMPTY, Contract

COMPLETION_MAX_TOKENS: Final = 16  # default ``max_tokens`` of a text completion, as at OpenAI and vLLM


class ImageUrl(ImageUrlBody, MessagePart):
    """Where an image is: an address, or a ``data:`` URL that holds it."""


class ContentPart(PartBody, MessagePart):
    """A part of a message: a text, an image in a user's message or a tool's result, the model's refusal."""

    neutral = openai_fields.CACHE_MARK
    type: Literal["text", "image_url", "refusal"]
    refusal: Text | None = None
    image_url: ImageUrl | None = None


class ChatMessage(MessagePart, CallFields):
    """One message; ``developer`` is OpenAI's newer word for ``system``."""

    neutral = openai_fields.MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[ContentPart] | None = None
    refusal: Text | None = None


def _known(messages: list[ChatMessage]) -> list[ChatMessage]:
    for index, message in enumerate(messages):
        content = message.content
        for number, part in enumerate(() if isinstance(content, str) else content or ()):
            at = (index, "content", number)
            if part.image_url is not None:
                check_known(part.image_url, at=(*at, "image_url"))
            check_known(part, at=at)
        if message.__pydantic_extra__:
            check_known(message, at=(index,))
    return messages


ChatMessages = Annotated[Listed[ChatMessage], AfterValidator(_known)]


class ChatRequest(OpenAIBody, ToolFields):
    """The body of ``POST /v1/chat/completions``."""

    neutral = openai_fields.CHAT
    messages: ChatMessages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(OpenAIBody):
    """The body of ``POST /v1/completions``."""

    neutral = openai_fields.COMPLETIONS
    prompt: Prompts
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def to_messages(messages: Sequence[ChatMessage]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The messages, and the paths of their unknown fields. Text parts are joined without a separator.

    Raises InvalidRequest: fields that do not go together.
    """
    found: list[Message] = []
    unknown: list[str] = []
    for index, one in enumerate(messages):
        content, role = one.content, one.role  # read once: each access to a field costs as much as a call
        # The message has only these two fields.
        if isinstance(content, str) and len(one.__pydantic_fields_set__) == 2 and role != "tool":
            found.append(Message(ROLES[role], content))
        else:
            found.append(_message(one, index))
            unknown += _unknown(one, f"messages.{index}")
    return with_latest_turn(tuple(found)), tuple(unknown)


def _unknown(message: ChatMessage, at: str) -> list[str]:
    unknown = [*message.unknown(at)]
    for number, part in enumerate(() if isinstance(message.content, str) else message.content or ()):
        unknown += part.unknown(f"{at}.content.{number}")
        if part.image_url is not None:
            unknown += part.image_url.unknown(f"{at}.content.{number}.image_url")
    return unknown


def _message(one: ChatMessage, index: int) -> Message:
    at, content = f"messages.{index}", one.content
    if one.refusal and one.role != "assistant":
        raise not_allowed(f"{at}.refusal", "is not supported", "null")
    if content and not isinstance(content, str):
        content = [_as_text(part, one, f"{at}.content.{number}") for number, part in enumerate(content)]
    text, parts = read_content(content, at)
    if one.refusal:
        text = (text or "") + one.refusal
    return with_parts(message_of(one, ROLES[one.role], text, at), parts)


def _as_text(part: ContentPart, message: ChatMessage, at: str) -> ContentPart:
    """The part; a refusal of the model as a text."""
    if part.type != "refusal":
        return part
    if message.role != "assistant":
        raise not_allowed(f"{at}.type", "is not supported", "'text' or 'image_url' in this message")
    return ContentPart(type="text", text=required(part.refusal, f"{at}.refusal"))


def chat_request(body: ChatRequest, origin: RequestOrigin) -> ParsedRequest:
    """Convert a validated chat body to a request. Raises InvalidRequest: fields that do not go together."""
    check_count(len(body.messages), origin.max_messages)
    messages, unknown = to_messages(body.messages)
    ending = chat_ending(continues=body.continue_final_message, generates=body.add_generation_prompt)
    check_latest(messages, continued=CONTINUES in ending)
    if body.top_logprobs and not body.logprobs:
        raise not_allowed("top_logprobs", f"is {body.top_logprobs} without logprobs", "with 'logprobs': true")
    max_tokens, fields = body.max_tokens, EMPTY
    if body.max_completion_tokens is not None:
        max_tokens, fields = body.max_completion_tokens, {"max_tokens": "max_completion_tokens"}
    tools, needs = tool_request(body, in_history=holds_calls(messages))
    if ending:
        tools = {**tools, "template_kwargs": {**tools.get("template_kwargs", EMPTY), **ending}}
        needs |= {Feature(CONTINUES if CONTINUES in ending else GENERATES)}
    return _asked(
        body,
        origin,
        Contract.CHAT,
        fields=fields,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        unknown=unknown,
        needs=needs,
        messages=messages,
        **tools,
    )


def completion_request(body: CompletionRequest, origin: RequestOrigin) -> ParsedRequest:
    """The request of a text completion; each prompt of a list becomes a request of its own."""
    first, *others = prompts_of(body.prompt, "prompt")
    each = (body.n or 1) * ((body.logprobs or 0) + 1)
    if others and (1 + len(others)) * each > MAX_LOGPROBS:
        allowed = f"prompts * n * (logprobs + 1) of {MAX_LOGPROBS} or less"
        raise not_allowed("prompt", f"is an array of {1 + len(others)} prompts", allowed)
    echo = bool(body.echo)
    if body.max_tokens == 0 and not echo:
        raise not_allowed("max_tokens", "is 0 without echo", "1 or more, or 0 with 'echo': true")
    if echo and body.logprobs is not None and (body.n or 1) > 1:
        # vLLM 0.32 gives the prompt's log-probabilities to one text of a stream, and fails at the next one.
        raise not_allowed("n", f"is {body.n} with echo and logprobs", "1")
    parsed = _asked(
        body,
        origin,
        Contract.COMPLETIONS,
        fields={"messages": "prompt"},
        # The engine generates at least one token; with ``prompt_only`` the answer leaves that token out.
        max_tokens=COMPLETION_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens),
        logprobs=body.logprobs,
        echo={"echo": True, "prompt_only": body.max_tokens == 0} if echo else EMPTY,
        raw_prompt=first,
    )
    if not others:
        return parsed
    if parsed.running_usage:
        raise not_allowed("stream_options.continuous_usage_stats", "is true with several prompts", "one")
    request = parsed.request
    further = tuple(
        [
            replace(
                request,
                generation_id=f"{request.generation_id}-{index}",
                labelled=False,
                raw_prompt=prompt,
                fields={**request.fields, "messages": f"prompt.{index}"},
            )
            for index, prompt in enumerate(others, 1)
        ]
    )
    return replace(parsed, further=further)


def _asked(
    body: OpenAIBody,
    origin: RequestOrigin,
    contract: Contract,
    *,
    fields: Mapping[str, str],
    max_tokens: int | None,
    logprobs: int | None,
    echo: Mapping[str, bool] = EMPTY,
    unknown: tuple[str, ...] = (),
    needs: frozenset[Feature] = frozenset(),
    **own: Any,
) -> ParsedRequest:
    """The parsed request; ``own``: its further fields.

    ``fields``: the body's own names of fields, by the native contract's names that internal errors use.
    ``unknown``: the paths of messages' unknown fields.
    """
    stream = bool(body.stream)
    options = body.stream_options
    usage = options is not None and bool(options.include_usage)
    if usage and not stream:
        raise not_allowed("stream_options", "is given without stream", "with 'stream': true")
    native = body.sluice or NO_FIELDS
    shaper, shape = shape_of(body)
    extra, needed = body.extra(unknown)
    given = body.__pydantic_extra__ or {}
    request = build_request(
        origin,
        contract,
        native,
        model=body.model,
        # Without a session id, OpenAI's prompt_cache_key or else its stable end-user id replaces it: requests
        # with one id get the same canary arm and prefer the same prefix cache.
        session_id=native.session_id
        or (label_or_none(given["prompt_cache_key"]) if "prompt_cache_key" in given else None)
        or body.user,
        user=body.user,
        sampling=sampling_of(body, max_tokens=max_tokens, logprobs=logprobs, **echo),
        response_format=shape,
        priority=origin.capped(body.priority or 0),
        stream=stream,
        extra=extra,
        needs=needs | needed,
        dropped=unknown,
        truncate=body.truncation == "auto",
        fields={**FIELDS, **fields, "response_format": shaper},
        **own,
    )
    token_ids = bool(body.sluice is not None and body.sluice.token_ids)
    running = usage and options is not None and bool(options.continuous_usage_stats)
    hides = given.get("include_reasoning") is False
    return ParsedRequest(request, usage, token_ids, running_usage=running, hides_reasoning=hides)
