"""OpenAI's answers and errors, and Sluice's own fields, which are all in the object ``sluice``."""

from collections.abc import Mapping
from typing import Any, Final, Literal, NotRequired

import orjson
from typing_extensions import TypedDict

from budgeting.values import ToolCall, ToolKind
from gateway.contracts.answer import Answer
from gateway.contracts.native_answer import AnswerReport, answer_report
from gateway.contracts.openai_logprobs import ChatLogprobs, CompletionLogprobs
from gateway.contracts.values import CUT_SHORT, WHOLE, Contract, FinishReason, Usage
from gateway.errors import PublicError


class CachedTokens(TypedDict):
    """Details of the prompt's tokens; ``cache_write_tokens`` only if there are any."""

    cached_tokens: int
    cache_write_tokens: NotRequired[int]


class ReasoningTokens(TypedDict):
    """Details of the generated tokens."""

    reasoning_tokens: int


class OpenAIUsage(TypedDict):
    """OpenAI's token counts; ``completion_tokens_details`` only if there are reasoning tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[ReasoningTokens]


class SluiceBody(AnswerReport):
    """Sluice's own fields; ``finish_reason`` is the exact one, for which OpenAI may have no value."""

    model: str
    backend_name: str


ReasoningField = Literal["reasoning", "reasoning_content"]
REASONING_FIELDS: Final[tuple[ReasoningField, ...]] = ("reasoning", "reasoning_content")


class FunctionCallBody(TypedDict):
    """The function of a call; ``arguments`` is JSON text."""

    name: NotRequired[str]
    arguments: str


class CustomCallBody(TypedDict):
    """The custom tool of a call; ``input`` is free text."""

    name: NotRequired[str]
    input: str


class ToolCallBody(TypedDict):
    """A tool call; in a stream, a part of one, with its ``index``."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[str]
    function: NotRequired[FunctionCallBody]
    custom: NotRequired[CustomCallBody]


class AssistantMessage(TypedDict):
    """The answer's message; the configuration sets which of the two fields has the reasoning, or both."""

    role: str
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallBody]]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]


class ChoiceBody(TypedDict):
    """An answer: a message (chat) or a text (completions).

    ``stop_reason`` is vLLM's field: the stop string that ended the text, if known.
    """

    index: int
    message: NotRequired[AssistantMessage]
    text: NotRequired[str]
    logprobs: ChatLogprobs | CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | None


class CompletionBody(TypedDict):
    """``chat.completion`` and ``text_completion``."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: OpenAIUsage
    sluice: SluiceBody


class PageBody(TypedDict):
    """A page of a list, with the ids of its first and last item."""

    object: str
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedBody(TypedDict):
    """The answer to the deletion of a file or of a response."""

    id: str
    object: str
    deleted: bool


class OpenAIErrorDetail(TypedDict):
    """OpenAI's error object: ``code`` is OpenAI's, ``sluice_code`` the native contract's."""

    message: str
    type: str
    param: str | None
    code: str
    sluice_code: str


class OpenAIErrorBody(TypedDict):
    """OpenAI's error."""

    error: OpenAIErrorDetail


FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    **dict.fromkeys(WHOLE, "stop"),
    **dict.fromkeys(CUT_SHORT, "length"),
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CONTENT_FILTER: "content_filter",
}
"""OpenAI has reasons for texts complete, cut short, or cut by a filter or refused, and for tool calls."""

OVERLOADED: Final = 529  # Anthropic's status code in place of 503
ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


_CODES: Final[Mapping[str, str]] = {
    "context_too_long": "context_length_exceeded",
    "unknown_model": "model_not_found",
    "rate_limited": "rate_limit_exceeded",
    "quota_exceeded": "insufficient_quota",
    "budget_exceeded": "insufficient_quota",
    "missing_key": "invalid_api_key",
    "invalid_key": "invalid_api_key",
}


def tool_call_body(call: ToolCall) -> ToolCallBody:
    body: ToolCallBody = {"id": call.id, "type": call.kind.value}
    if call.kind is ToolKind.CUSTOM:
        return {**body, "custom": {"name": call.name, "input": call.arguments}}
    return {**body, "function": {"name": call.name, "arguments": call.arguments}}


def usage_body(usage: Usage) -> OpenAIUsage:
    """OpenAI's token counts; the prompt's tokens include the cached ones."""
    body: OpenAIUsage = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.cache_write_tokens:
        body["prompt_tokens_details"]["cache_write_tokens"] = usage.cache_write_tokens
    if usage.reasoning_tokens:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


def sluice_body(answer: Answer) -> dict[str, Any]:
    """The object ``sluice`` of an answer, or of a stream's last chunk."""
    return {**answer_report(answer), "model": answer.model, "backend_name": answer.backend_name}


def error_body(error: PublicError) -> OpenAIErrorBody:
    status = sent_status(error, Contract.CHAT)
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = error.message
    if error.code == "context_too_long":
        # LiteLLM, and tools that use it, detect by these words that they must shorten the conversation.
        message = f"This model's maximum context length is exceeded: {message}"
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": error.param,
            "code": _code(error),
            "sluice_code": error.code,
        }
    }


def _code(error: PublicError) -> str:
    if error.code == "unknown_adapter" and error.param == "model":  # clients see an adapter as a model
        return _CODES["unknown_model"]
    return _CODES.get(error.code, error.code)


def sent_status(error: PublicError, contract: Contract) -> int:
    """The HTTP status of an error: 422 only in the native contract, 529 instead of 503 in Anthropic's."""
    if contract is Contract.NATIVE:
        return error.status
    if error.status == 503 and contract is Contract.MESSAGES:
        return OVERLOADED
    return 400 if error.status == 422 else error.status


def error_json(error: PublicError, request_id: str) -> tuple[int, bytes]:
    """HTTP status and JSON body of an error; the request id is only in the header."""
    return sent_status(error, Contract.CHAT), orjson.dumps(error_body(error))
