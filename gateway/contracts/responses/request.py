"""Converts a validated body of ``/v1/responses`` to a request."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from gateway.contracts.checks import check_count, check_latest, with_latest_turn
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.formats import object_shape
from gateway.contracts.images import holds_data
from gateway.contracts.native import NO_FIELDS, build_request
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import not_allowed, required
from gateway.contracts.responses.body import ChoiceObject, InputItem, ResponsesBody, TextFormat
from gateway.contracts.responses.conversation import chosen, conversation, flat_tools, stored_item
from gateway.contracts.tools import asked_tools, checked_tools, holds_calls, to_choice
from gateway.contracts.values import EMPTY, PLAIN_TEXT, Contract, FormatType, ResponseFormat, Sampling
from gateway.errors import InvalidRequest

INCLUDED_LOGPROBS: Final = "message.output_text.logprobs"
INCLUDED_SEALED: Final = "reasoning.encrypted_content"


class ReasoningSeal(Protocol):
    """Encrypts reasoning for clients that send it back; it is bound to a tenant and a model."""

    def seal(self, tenant: str, model: str, text: str) -> str:
        """The encrypted text."""

    def opened(self, tenant: str, model: str, sealed: str) -> str | None:
        """The text; ``None`` if it was sealed elsewhere or for another tenant or model, or is damaged."""


class ResponsesRequest(ParsedRequest, frozen=True):
    """A parsed request, with ``echo``, which the response object repeats, and the namespaces of its tools.

    ``items``: its own input, if the response is stored. ``seal``: makes the ``encrypted_content`` of its
    reasoning, if that was requested and there is a key. ``again``: data to run it again on another gateway.
    ``size``: the bytes of its body.
    """

    echo: Mapping[str, Any] = EMPTY
    namespaces: Mapping[str, tuple[str, str]] = EMPTY
    store: bool = False
    background: bool = False
    previous_id: str | None = None
    items: Sequence[Mapping[str, Any]] = ()
    seal: Callable[[str], str] | None = None
    again: bytes | None = None
    size: int = 0


_FIELDS: Final[Mapping[str, str]] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "adapter_id": "model",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


def responses_request(
    body: ResponsesBody,
    origin: RequestOrigin,
    *,
    stores: bool = False,
    before: Sequence[Mapping[str, Any]] = (),
    seal: ReasoningSeal | None = None,
    size: int = 0,
) -> ResponsesRequest:
    """Convert a validated body to a request. Raises InvalidRequest: fields that do not go together.

    ``stores``: whether responses can be stored; ``before``: the items of the conversation that the request
    continues.
    """
    bound = origin.caller.tenant, body.model
    open_seal = None if seal is None else partial(seal.opened, *bound)
    earlier = [stored_item(one, "previous_response_id") for one in before]
    messages = with_latest_turn(tuple(conversation(body, earlier, open_seal)))
    store = _stores(body, stores, holds_data(messages))
    namespaces: dict[str, tuple[str, str]] = {}
    placed = list(flat_tools(body.tools or (), namespaces))
    tools = checked_tools(placed)
    included = body.include or ()
    if body.top_logprobs and INCLUDED_LOGPROBS not in included:
        raise not_allowed(
            "top_logprobs", "is given without include", f"with {INCLUDED_LOGPROBS!r} in include"
        )
    own, needs = asked_tools(
        tools,
        to_choice(body.tool_choice, tools, chosen),
        parallel=body.parallel_tool_calls,
        effort=None if body.reasoning is None else body.reasoning.effort,
        in_history=holds_calls(messages),
    )
    native = body.sluice or NO_FIELDS
    check_count(len(messages), origin.max_messages, "input")
    try:
        check_latest(messages)
    except InvalidRequest as error:
        raise _unanswerable(body.input, error) from None
    request = build_request(
        origin,
        Contract.RESPONSES,
        native,
        messages=messages,
        model=body.model,
        # prompt_cache_key is a client's own key for a conversation, whose requests then share a prefix cache.
        session_id=native.session_id or body.prompt_cache_key or body.user,
        user=body.user,
        sampling=Sampling(
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            logprobs=(body.top_logprobs or 0) if INCLUDED_LOGPROBS in included else None,
            ignore_eos=bool(body.ignore_eos),
        ),
        response_format=_shape(None if body.text is None else body.text.format),
        priority=origin.capped(0),
        stream=bool(body.stream),
        needs=needs,
        truncate=body.truncation == "auto",
        fields=_fields([at for at, _ in placed]),
        **own,
    )
    return ResponsesRequest(
        request,
        echo={**_echo(body), "store": store},
        namespaces=namespaces,
        store=store,
        background=bool(body.background),
        previous_id=body.previous_response_id,
        items=input_items(body, origin.generation_id) if store else (),
        seal=partial(seal.seal, *bound) if seal is not None and INCLUDED_SEALED in included else None,
        size=size,
    )


def _unanswerable(given: str | Sequence[InputItem], error: InvalidRequest) -> InvalidRequest:
    """The error about the last message, in terms of the last item: several items may be one message."""
    if not given and not isinstance(given, str):
        return not_allowed("input", "has no items", "one or more")
    last = given if isinstance(given, str) else given[-1]
    at = "input" if isinstance(last, str) else f"input.{len(given) - 1}"
    message = re.sub(r"^messages\.\d+(\.content)?", at, error.message)
    if not isinstance(last, str) and message.startswith(f"{at}.role "):
        shown = f"role is '{last.role}'" if last.type == "message" else f"type is '{last.type}'"
        message = f"{at}.{shown}; allowed: a message of 'user' or the output of a call as the last item"
    return InvalidRequest(message, param="input")


def input_items(body: ResponsesBody, generation_id: str) -> list[dict[str, Any]]:
    """The items of ``input`` as they are listed; an id that is no text, or is repeated, is replaced.

    A message's text becomes a part: the official client's listed messages have parts alone.
    """
    own = generation_id.removeprefix("gen_")
    if isinstance(body.input, str):
        given: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": body.input}]
    else:
        given = [one.model_dump(exclude_none=True) | {"type": one.type} for one in body.input]
    found: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(given):
        key = one.get("id")
        if not isinstance(key, str) or not key or key in found:
            key = f"item_{own}_{number}"
        if one["type"] == "message" and isinstance(text := one.get("content"), str):
            part: dict[str, Any] = {"type": "input_text", "text": text}
            if one["role"] == "assistant":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            one["content"] = [part]
        found[key] = {"status": "completed", **one, "id": key}
    return list(found.values())


def _stores(body: ResponsesBody, stores: bool, holds_image: bool) -> bool:
    """Whether the response is stored: by default it is, as at OpenAI. Raises InvalidRequest.

    A request whose input contains an image's data is not stored, and its response says so.
    """
    if body.store and not stores:
        raise not_allowed("store", "is true", "false, this gateway stores no responses")
    if body.store and holds_image:
        raise not_allowed("store", "is true with an image in the input", "false, or the image's address")
    stores = stores and not holds_image
    store = stores if body.store is None else body.store
    if body.background and not store:
        raise not_allowed("background", "is true", "false where the response is not stored")
    return store


def _fields(tools: Sequence[str]) -> Mapping[str, str]:
    """This body's field names, by the names that internal errors use. ``tools``: the paths of its tools."""
    fields = {**_FIELDS}
    for index, at in enumerate(tools):
        fields[f"tools.{index}.function.parameters"] = f"{at}.parameters"
        fields[f"tools.{index}.custom.format"] = f"{at}.format"
    return fields


def _shape(given: TextFormat | None) -> ResponseFormat:
    if given is None:
        return PLAIN_TEXT
    field = "text.format.schema"
    if given.type != "json_schema":
        if given.schema_ is not None:
            raise not_allowed(field, "is an object", f"null when text.format.type is '{given.type}'")
        return ResponseFormat(FormatType(given.type))
    required(given.name, "text.format.name")  # the response repeats it, and clients refuse one without
    return replace(object_shape(required(given.schema_, field), field), strict=given.strict)


_ECHOED: Final = (
    *("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key"),
    *("temperature", "top_logprobs", "top_p", "user"),
)


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """The fields of the request that its response object repeats, with their defaults."""
    text, reasoning = body.text, body.reasoning
    shape = None if text is None or text.format is None else text.format
    return {
        **{name: getattr(body, name) for name in _ECHOED},
        "background": bool(body.background),
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": "default",
        "text": {
            "format": {"type": "text"}
            if shape is None
            else shape.model_dump(by_alias=True, exclude_unset=True)
        },
        "tool_choice": "auto" if body.tool_choice is None else _plain_choice(body.tool_choice),
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        "truncation": body.truncation or "disabled",
    }


def _plain_choice(choice: str | ChoiceObject) -> Any:
    if isinstance(choice, str):
        return choice
    return choice.model_dump(exclude_none=True, exclude=None if choice.type == "allowed_tools" else {"mode"})
