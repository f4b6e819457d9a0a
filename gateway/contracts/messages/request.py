"""Converts a validated body of ``/v1/messages`` to a request."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.contracts.checks import check_count
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.features import Feature
from gateway.contracts.fields import label_or_none
from gateway.contracts.formats import object_shape
from gateway.contracts.messages.body import MAX_DROPPED, CountRequest, MessagesRequest
from gateway.contracts.messages.conversation import chosen, conversation, input_tools
from gateway.contracts.native import NO_FIELDS, build_request
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import not_allowed, path_of
from gateway.contracts.tools import asked_tools, holds_calls
from gateway.contracts.values import PLAIN_TEXT, Contract, GenerateRequest, Sampling

LOW_BUDGET: Final = 4_096
MEDIUM_BUDGET: Final = 16_384
"""Largest ``thinking.budget_tokens`` that count as low and as medium effort. Claude Code's three levels of
thinking have 4,000, 10,000 and 31,999 tokens."""


def messages_request(body: MessagesRequest, origin: RequestOrigin) -> ParsedRequest:
    """The request for an answer. Raises InvalidRequest: a rule that types cannot express."""
    thinking = body.thinking
    budget = thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None
    if budget is not None and budget >= body.max_tokens:
        allowed = f"less than max_tokens, which is {body.max_tokens}"
        raise not_allowed("thinking.budget_tokens", f"is {budget}", allowed)
    user = label_or_none(body.metadata.user_id if body.metadata is not None else None)
    sampling = Sampling(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=tuple(body.stop_sequences or ()),
    )
    return ParsedRequest(
        _request(body, origin, sampling=sampling, user=user, stream=bool(body.stream)), include_usage=True
    )


def counted_request(body: CountRequest, origin: RequestOrigin) -> GenerateRequest:
    """The request whose prompt is counted; nothing is generated for it."""
    return _request(body, origin, sampling=Sampling(max_tokens=1), user=None)


def _request(body: CountRequest, origin: RequestOrigin, *, user: str | None, **own: Any) -> GenerateRequest:
    check_count(len(body.messages), origin.max_messages)
    messages = conversation(body)
    check_count(len(messages), origin.max_messages)
    native = body.sluice or NO_FIELDS
    tools, choice = input_tools(body.tools or ()), body.tool_choice
    asked, needs = asked_tools(
        tools,
        chosen(choice, tools),
        parallel=False if choice is not None and choice.disable_parallel_tool_use else None,
        effort=_effort(body),
        in_history=holds_calls(messages),
    )
    shaped, at = body.output_format, "output_format"
    if (config := body.output_config) is not None and config.format is not None:
        if shaped is not None:
            raise not_allowed(at, "is given with output_config.format", "one of them")
        shaped, at = config.format, "output_config.format"
    shape = object_shape(shaped.json_schema, f"{at}.schema") if shaped else PLAIN_TEXT
    unknown = body.unknown
    return build_request(
        origin,
        Contract.MESSAGES,
        native,
        messages=messages,
        model=body.model,
        session_id=native.session_id or origin.session_id or user,
        user=user,
        response_format=shape,
        priority=origin.capped(0),
        # The effort is only a hint in this contract, because clients send one to every model.
        needs=needs - {Feature.REASONING_EFFORT},
        dropped=tuple([path_of([name]) for name in unknown[:MAX_DROPPED]]),
        fields=_fields(len(tools), at),
        **own,
        **asked,
    )


def _effort(body: CountRequest) -> str | None:
    """The reasoning effort: the given one, else one that matches the given thinking budget."""
    thinking, config = body.thinking, body.output_config
    if thinking is not None and thinking.type == "disabled":
        return "none"
    if config is not None and config.effort is not None:
        return config.effort
    if thinking is None or thinking.type != "enabled" or thinking.budget_tokens is None:
        return None
    budget = thinking.budget_tokens
    return "low" if budget <= LOW_BUDGET else "medium" if budget <= MEDIUM_BUDGET else "high"


def _fields(tools: int, response_format: str) -> Mapping[str, str]:
    """This body's field names, by the native contract's names that internal errors use."""
    return {
        "adapter_id": "model",
        "reasoning_effort": "output_config.effort",
        "response_format": response_format,
        "stop": "stop_sequences",
        **{f"tools.{index}.function.parameters": f"tools.{index}.input_schema" for index in range(tools)},
    }
