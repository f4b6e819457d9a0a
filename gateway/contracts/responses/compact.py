"""Compaction of ``/v1/responses/compact``: the model's summary takes the place of a conversation."""

from collections.abc import Mapping
from typing import Any, Final

from typing_extensions import TypedDict

from budgeting.values import ImageContent, Role
from gateway.contracts.answer import Answer
from gateway.contracts.openai_answer import sluice_body
from gateway.contracts.refusals import not_allowed
from gateway.contracts.responses.answer import ResponseUsage, own_id, usage_body
from gateway.contracts.responses.body import CompactBody, InputItem, ResponsesBody
from gateway.contracts.responses.conversation import SUMMARY_BEGINS
from gateway.contracts.responses.request import ResponsesRequest
from gateway.contracts.values import FinishReason

SUMMARIZE: Final = (
    "Summarize our conversation so far. It will be continued from your summary and my own messages alone, so"
    " keep every decision, fact, name, number and path, what tools returned, and what is still to be done."
    " Answer with the summary only."
)


class CompactedBody(TypedDict):
    """A compacted conversation: the user's messages, and the item that stands for all the rest."""

    id: str
    object: str
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage
    sluice: dict[str, Any]


def summary_body(given: CompactBody) -> ResponsesBody:
    """The request for the summary. Raises InvalidRequest: no conversation, or a field has no use."""
    for name in ("background", "store", "stream"):
        if getattr(given, name):
            raise not_allowed(name, "is true", "false for a compaction")
    if not given.input and given.previous_response_id is None:
        raise not_allowed("input", "is missing or empty", "a conversation, or previous_response_id")
    own = [InputItem(role="user", content=given.input)] if isinstance(given.input, str) else given.input or ()
    ask = InputItem(role="user", content=SUMMARIZE)
    choice = "none" if given.tools else None
    return given.model_copy(update={"input": [*own, ask], "store": False, "tool_choice": choice})


def compacted(asked: ResponsesRequest, answer: Answer) -> CompactedBody:
    """The compacted conversation. Raises InvalidRequest: the model gave no whole summary."""
    if answer.finish_reason is not FinishReason.STOP or not answer.output_text:
        ending = f"has no whole summary: it ended with '{answer.finish_reason.value}'"
        raise not_allowed("input", ending, "a conversation that leaves the model room for a summary")
    request, own = asked.request, own_id(answer.generation_id)
    output = [
        {
            "type": "message",
            "id": f"msg_{own}_{number}",
            "status": "completed",
            "role": "user",
            "content": [_part(part, request.images) for part in one.parts or (one.content,)],
        }
        for number, one in enumerate(request.messages[:-1])
        if one.role is Role.USER
    ]
    summary = f"{SUMMARY_BEGINS}{answer.output_text}"
    return {
        "id": f"resp_{own}",
        "object": "response.compaction",
        "created_at": request.created,
        "output": [*output, {"type": "compaction", "id": f"cmp_{own}", "encrypted_content": summary}],
        "usage": usage_body(answer.usage),
        "sluice": sluice_body(answer),
    }


def _part(part: object, images: Mapping[str, memoryview]) -> dict[str, Any]:
    if not isinstance(part, ImageContent):
        return {"type": "input_text", "text": part}
    kind, comma, data = part.url.rpartition(",")
    url = f"{kind}{comma}{str(images[data], 'ascii')}" if data in images else part.url
    return {"type": "input_image", "image_url": url, "detail": part.detail or "auto"}
