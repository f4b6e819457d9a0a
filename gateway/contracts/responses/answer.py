"""The response object of an answer, whole or in progress."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from typing_extensions import TypedDict

from budgeting.values import ToolCall, ToolKind
from gateway.contracts.answer import Answer
from gateway.contracts.openai_answer import SluiceBody, error_body, sluice_body
from gateway.contracts.openai_logprobs import ChatLogprob, chat_logprobs
from gateway.contracts.responses.conversation import reasoning_of, stored_item
from gateway.contracts.responses.request import ResponsesRequest
from gateway.contracts.values import CUT_SHORT, WHOLE, FinishReason, TokenLogprob, Usage
from gateway.errors import PublicError


class ResponseUsage(TypedDict):
    """OpenAI's token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseBody(TypedDict):
    """A response; it also repeats the request's own fields, as OpenAI's does."""

    id: str
    object: str
    created_at: int
    status: str
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    sluice: SluiceBody


Item = dict[str, Any]

STATUS: Final[Mapping[FinishReason, str]] = {
    **dict.fromkeys((*WHOLE, FinishReason.TOOL_CALLS), "completed"),
    **dict.fromkeys((*CUT_SHORT, FinishReason.CONTENT_FILTER), "incomplete"),
    FinishReason.ERROR: "failed",
}


_FAILURES: Final = frozenset({"context_length_exceeded", "rate_limit_exceeded", "insufficient_quota"})
"""The codes of a failed response that are not replaced by a general one: clients act on them."""


def own_id(generation_id: str) -> str:
    return generation_id.removeprefix("gen_")


def response_body(
    asked: ResponsesRequest, status: str, model: str, output: Sequence[Item] = (), **own: Any
) -> dict[str, Any]:
    """The response object with this status; ``own`` are additional fields."""
    request = asked.request
    return {
        "id": f"resp_{own_id(request.generation_id)}",
        "object": "response",
        "created_at": request.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": output,
        "usage": None,
        **asked.echo,
        **own,
    }


def ended_response(asked: ResponsesRequest, answer: Answer, output: Sequence[Item]) -> dict[str, Any]:
    status = STATUS[answer.finish_reason]
    own: dict[str, Any] = {"usage": usage_body(answer.usage), "sluice": sluice_body(answer)}
    if status == "incomplete":
        # The contract has no reason for a deadline; `sluice.finish_reason` is exact.
        filtered = answer.finish_reason is FinishReason.CONTENT_FILTER
        own["incomplete_details"] = {"reason": "content_filter" if filtered else "max_output_tokens"}
    elif status == "failed":
        own["error"] = {
            "code": "server_error",
            "message": (*answer.warnings, "the answer ended with an error")[0],
        }
    else:
        own["completed_at"] = asked.request.created + round(answer.timings.total_ms / 1000)
    return response_body(asked, status, answer.model, output, **own)


def failed_response(
    asked: ResponsesRequest, error: PublicError, model: str, output: Sequence[Item]
) -> dict[str, Any]:
    """The response object of an answer that failed; it is stored only if it ran in the background."""
    detail = error_body(error)["error"]
    code = detail["code"]
    if error.status >= 500:
        code = "server_error"
    elif code not in _FAILURES:
        code = "invalid_prompt"
    own = {"code": code, "message": detail["message"]}
    store = asked.store and asked.background
    return response_body(asked, "failed", model, output, error=own, store=store)


def usage_body(usage: Usage) -> ResponseUsage:
    """The token counts, always with details, because clients fail without them."""
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def reasoning_item(asked: ResponsesRequest, item_id: str, text: str, status: str) -> Item:
    """The item of the model's reasoning, also sealed if that was requested."""
    item: Item = {"type": "reasoning", "id": item_id, "summary": [], "content": [], "status": status}
    if status != "in_progress":
        item["content"] = [{"type": "reasoning_text", "text": text}]
        if asked.seal is not None:
            item["encrypted_content"] = asked.seal(text)
    return item


def sealed_items(items: Sequence[Mapping[str, Any]], seal: Callable[[str], str]) -> list[Item]:
    """Stored items, of which each with a text of reasoning also has it sealed. Raises as stored_item."""
    return [
        {**one, "encrypted_content": seal(text)}
        if one["type"] == "reasoning"
        and not one.get("encrypted_content")
        and (text := reasoning_of(stored_item(one, "include"), "", None))
        else {**one}
        for one in items
    ]


def text_part(text: str, logprobs: Sequence[TokenLogprob] = ()) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": text_logprobs(logprobs)}


def text_logprobs(logprobs: Sequence[TokenLogprob]) -> list[ChatLogprob]:
    return chat_logprobs(logprobs)["content"] if logprobs else []


def message_item(item_id: str, text: str, status: str, logprobs: Sequence[TokenLogprob] = ()) -> Item:
    content = [text_part(text, logprobs)] if status != "in_progress" else []
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": content}


def call_item(asked: ResponsesRequest, item_id: str, call: ToolCall, status: str) -> Item:
    """The item of a call; a namespace and its member's name are separated again."""
    namespace, name = asked.namespaces.get(call.name, (None, call.name))
    where = {} if namespace is None else {"namespace": namespace}
    if call.kind is ToolKind.CUSTOM:
        head: Item = {"type": "custom_tool_call", "input": call.arguments}
    else:
        head = {"type": "function_call", "arguments": call.arguments}
    return {**head, "id": item_id, "call_id": call.id, "name": name, **where, "status": status}
