"""Anthropic's message and error."""

from collections.abc import Mapping
from typing import Any, Final, Literal, NotRequired

import orjson
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from gateway.contracts.answer import Answer
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.events import Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.openai_answer import ERROR_TYPES, OVERLOADED, SluiceBody, sent_status, sluice_body
from gateway.contracts.values import CUT_SHORT, WHOLE, Contract, FinishReason, Usage
from gateway.errors import PublicError

_CALL_ID: Final = "toolu_sluice_"


def shown_call_id(id: str) -> str:
    """A call's id in the format that this contract's clients expect; :func:`own_call_id` reverses it."""
    return f"{_CALL_ID}{id}"


def own_call_id(id: str) -> str:
    """The original id of a call; an id that :func:`shown_call_id` did not make is unchanged."""
    return id.removeprefix(_CALL_ID)


class AnswerBlock(TypedDict):
    """A block of an answer; its fields depend on its type."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class OutputDetails(TypedDict):
    """The output tokens that are the model's reasoning."""

    thinking_tokens: int


class MessageUsage(TypedDict):
    """Token counts; the whole input is the sum of three: ``input_tokens`` are those not found in a cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputDetails]


class MessageBody(TypedDict):
    """A whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    sluice: NotRequired[SluiceBody]


class MessagesErrorDetail(TypedDict):
    """Details of an error; ``sluice_code`` and ``param`` are Sluice's own fields."""

    type: str
    message: str
    param: str | None
    sluice_code: str
    details: NotRequired[Mapping[str, str]]


class MessagesErrorBody(TypedDict):
    """Anthropic's error."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


STOP_REASONS: Final[Mapping[FinishReason, str]] = {
    **dict.fromkeys(WHOLE, "end_turn"),
    **dict.fromkeys(CUT_SHORT, "max_tokens"),
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}
"""Anthropic has reasons for texts complete, cut short or refused, and calls; ``sluice`` has the exact one."""

_ERROR_TYPES: Final[Mapping[int, str]] = {
    **ERROR_TYPES,
    402: "billing_error",
    413: "request_too_large",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def stop_reason(asked: ParsedRequest, answer: Answer) -> str:
    """Anthropic's stop reason; it distinguishes ``max_tokens`` from a full context, which had less room."""
    if answer.finish_reason is FinishReason.STOP and answer.stop_sequence is not None:
        return "stop_sequence"
    sampling, room = asked.request.sampling, answer.budget.generation_reserve
    # If a stop string cuts a call, the finish reason is LENGTH too, but room is left.
    full = room < (sampling.max_tokens or 0) and (not sampling.stop or answer.usage.output_tokens >= room)
    if answer.finish_reason is FinishReason.LENGTH and (full or answer.context_full):
        return "model_context_window_exceeded"
    return STOP_REASONS[answer.finish_reason]


def message_usage(usage: Usage) -> MessageUsage:
    counts: MessageUsage = {
        "input_tokens": usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }
    if usage.reasoning_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def message_head(asked: ParsedRequest, model: str, usage: Usage) -> MessageBody:
    """A message object without content and a stop reason."""
    return {
        "id": f"msg_{asked.request.generation_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": message_usage(usage),
    }


def message_json(asked: ParsedRequest, answer: Answer) -> bytes:
    body = {
        **message_head(asked, answer.model, answer.usage),
        "content": _content(asked, answer),
        "stop_reason": stop_reason(asked, answer),
        "stop_sequence": answer.stop_sequence,
        "sluice": sluice_body(answer),
    }
    return orjson.dumps(body)


def _content(asked: ParsedRequest, answer: Answer) -> list[AnswerBlock]:
    """The blocks that the answer's stream would have; blanks before a text are a part of it, or of none."""
    content: list[AnswerBlock] = []
    held = ""
    for event in answer.in_order:
        match event:
            case ToolBegin():
                content.append(
                    {"type": "tool_use", "id": shown_call_id(event.id), "name": event.text, "input": {}}
                )
            case ToolArgs():
                content[-1]["input"] = _input(event.text)
            case ToolEnd():
                pass
            case Reasoning() if content and content[-1]["type"] == "thinking":
                content[-1]["thinking"] += event.text
            case Reasoning():
                content.append({"type": "thinking", "thinking": event.text, "signature": signature_of(asked)})
            case _:
                held += event.text
                if held.strip():  # an empty text before a call would end a client's tool loop
                    content.append({"type": "text", "text": held})
                    held = ""
    return content


def signature_of(asked: ParsedRequest) -> str:
    """The value that replaces Anthropic's signature of a thinking block; clients send it back."""
    return f"sluice-{asked.request.generation_id}"


def _input(arguments: str) -> Any:
    """A call's arguments as a JSON object, as far as they are complete; other text is put into one."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return {"arguments": arguments}
    return orjson.Fragment(to_json(value, inf_nan_mode="null"))  # orjson writes no integers beyond 64 bits


def messages_error(error: PublicError, request_id: str) -> MessagesErrorBody:
    status = sent_status(error, Contract.MESSAGES)
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error.message
    if error.code == "context_too_long":
        # This contract's clients detect by these words that they must shorten the conversation.
        message = f"prompt is too long: {message}"
    detail: MessagesErrorDetail = {
        "type": kind,
        "message": message,
        "param": error.param,
        "sluice_code": error.code,
    }
    if error.param == "thread":
        # The clients' tool runners then send the whole conversation, without a thread.
        detail["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": detail, "request_id": request_id}


def messages_error_json(error: PublicError, request_id: str) -> tuple[int, bytes]:
    return sent_status(error, Contract.MESSAGES), orjson.dumps(messages_error(error, request_id))
