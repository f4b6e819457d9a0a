"""The stream of a response: numbered events, one open item at a time, one terminal event."""

import json
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson
from msgspec import Struct

from budgeting.values import Plan, ToolCall, ToolKind
from gateway.contracts.answer import Answer
from gateway.contracts.dialect import ContractDialect, ParsedRequest
from gateway.contracts.events import Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.openai_answer import error_json
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import parse
from gateway.contracts.responses.answer import (
    STATUS,
    Item,
    call_item,
    ended_response,
    failed_response,
    message_item,
    own_id,
    reasoning_item,
    response_body,
    text_logprobs,
    text_part,
)
from gateway.contracts.responses.body import ResponsesBody
from gateway.contracts.responses.request import ResponsesRequest, responses_request
from gateway.contracts.values import TokenLogprob
from gateway.errors import PublicError

OPENING_EVENTS: Final = 3
"""``response.created``, ``response.queued`` of a background response, and ``response.in_progress``; they have
the first sequence numbers."""


class _Open(Struct, eq=False):
    """The open item of the output."""

    kind: str
    item_id: str
    begin: ToolBegin | None = None
    pieces: list[str] = []
    logprobs: list[TokenLogprob] = []
    head: bytes = b""


class ResponseFrames:
    """The events of one stream."""

    around: Final = None
    ping: Final = b""

    def __init__(self, asked: ResponsesRequest, model: str) -> None:
        self._asked = asked
        self._model = model
        self._own = own_id(asked.request.generation_id)
        self._number = OPENING_EVENTS if asked.background else OPENING_EVENTS - 1
        self._items: list[Item] = []
        self._open: _Open | None = None
        self._closing = b""
        self._ended: dict[str, Any] | None = None

    @property
    def opening(self) -> bytes:
        return _opening(response_body(self._asked, "in_progress", self._model))

    def delta(self, delta: Delta) -> bytes:
        """A piece of a message, built around one JSON string as in chats; nothing for tokens outside."""
        if not delta.text and (self._open is None or self._open.kind != "message"):
            return b""
        opened, item = self._in("message")
        item.pieces.append(delta.text)
        item.logprobs += delta.logprobs
        logprobs = orjson.dumps(text_logprobs(delta.logprobs)) if delta.logprobs else b"[]"
        text, number = orjson.dumps(delta.text), self._next()
        return b'%b%b%d,"delta":%b,"logprobs":%b}\n\n' % (opened, item.head, number, text, logprobs)

    def event(self, event: Delta) -> bytes:
        match event:
            case ToolBegin():
                return self._begin(event.kind, event)[0]
            case ToolEnd():
                return self._close()
            case ToolArgs() | Reasoning() if event.text:
                opened, item = (b"", self._open) if isinstance(event, ToolArgs) else self._in("reasoning")
                assert item is not None
                item.pieces.append(event.text)
                return b'%b%b%d,"delta":%b}\n\n' % (opened, item.head, self._next(), orjson.dumps(event.text))
        return b""

    def ending(self, answer: Answer) -> dict[str, Any]:
        """The response object of the terminal event; :meth:`finish` also sends changes made to it before."""
        if self._ended is None:
            status = STATUS[answer.finish_reason]
            # An answer without text has a message, as when it is whole.
            opened = b"" if self._items or self._open is not None else self._in("message")[0]
            self._closing = opened + self._close("completed" if status == "completed" else "incomplete")
            self._ended = ended_response(self._asked, answer, self._items)
        return self._ended

    def finish(self, answer: Answer) -> bytes:
        """The terminal event; it is not ``response.completed`` if the answer was cut short or has a fault."""
        response = self.ending(answer)
        kind = f"response.{STATUS[answer.finish_reason]}"
        return self._closing + _frame(kind, self._next(), response=response)

    def state(self, status: str, **own: Any) -> dict[str, Any]:
        return response_body(self._asked, status, self._model, self._items, **own)

    def stop(self, response: Mapping[str, Any]) -> bytes:
        """The terminal event of a cancelled response."""
        return self._close("incomplete") + _frame("response.incomplete", self._next(), response=response)

    def fail(self, error: PublicError, request_id: str) -> bytes:
        closing = self._close("incomplete")
        broken = failed_response(self._asked, error, self._model, self._items)
        return closing + _frame("response.failed", self._next(), response=broken)

    def _next(self) -> int:
        number = self._number
        self._number += 1
        return number

    def _in(self, kind: str) -> tuple[bytes, _Open]:
        """The open item, of this kind, and the events that open it if it is new."""
        if self._open is not None and self._open.kind == kind:
            return b"", self._open
        return self._begin(kind)

    def _begin(self, kind: str, begin: ToolBegin | None = None) -> tuple[bytes, _Open]:
        """A new open item, and the events that close the one before and open it."""
        closed, index = self._close(), len(self._items)
        prefix, delta = _KINDS[kind]
        item = self._open = _Open(kind, f"{prefix}_{self._own}_{index}", begin)
        place = {"item_id": item.item_id, "output_index": index}
        shown = self._shown(item, "in_progress")
        added = _frame("response.output_item.added", self._next(), output_index=index, item=shown)
        if begin is None:
            place["content_index"] = 0
            part = text_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
            added += _frame("response.content_part.added", self._next(), **place, part=part)
        head = orjson.dumps({"type": f"{delta}.delta", **place})
        item.head = b"event: %b.delta\ndata: %b" % (delta.encode(), head[:-1]) + b',"sequence_number":'
        return closed + added, item

    def _close(self, status: str = "completed") -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        text, index = "".join(item.pieces), len(self._items)
        if item.kind == ToolKind.FUNCTION and not _is_json(text):
            status = "incomplete"  # the call was cut
        place: dict[str, Any] = {"item_id": item.item_id, "output_index": index}
        whole = self._shown(item, status)
        _, kind = _KINDS[item.kind]
        if item.begin is not None:
            field = "input" if item.kind == ToolKind.CUSTOM else "arguments"
            named = {} if item.kind == ToolKind.CUSTOM else {"name": whole["name"]}
            done = _frame(f"{kind}.done", self._next(), **place, **named, **{field: text})
        else:
            place["content_index"] = 0
            logprobs = {"logprobs": text_logprobs(item.logprobs)} if item.kind == "message" else {}
            done = _frame(f"{kind}.done", self._next(), **place, text=text, **logprobs)
            done += _frame("response.content_part.done", self._next(), **place, part=whole["content"][0])
        self._items.append(whole)
        return done + _frame("response.output_item.done", self._next(), output_index=index, item=whole)

    def _shown(self, item: _Open, status: str) -> Item:
        text = "".join(item.pieces)
        if item.begin is not None:
            call = ToolCall(item.begin.id, item.begin.text, text, item.begin.kind)
            return call_item(self._asked, item.item_id, call, status)
        if item.kind == "message":
            return message_item(item.item_id, text, status, item.logprobs)
        return reasoning_item(self._asked, item.item_id, text, status)


def whole_response(asked: ResponsesRequest, answer: Answer) -> dict[str, Any]:
    """The response object of a whole answer: that of its stream's terminal event."""
    frames = ResponseFrames(asked, answer.model)
    for event in answer.in_order:
        frames.delta(event) if type(event) is Delta else frames.event(event)
    return frames.ending(answer)


def ended_elsewhere(response: Mapping[str, Any], after: int) -> bytes:
    """The first and last events of a response that was ended without the gateway that ran it.

    The last event's number is higher than ``after``, the last number that the client has.
    """
    begun = {**response, "status": "in_progress", "output": [], "error": None}
    kind = "response.failed" if response["status"] == "failed" else "response.incomplete"
    end = _frame(kind, max(OPENING_EVENTS, after + 1), response=response)
    return _opening(begun) + end


def _opening(begun: Mapping[str, Any]) -> bytes:
    events = [("created", begun), ("in_progress", begun)]
    if begun.get("background"):
        queued = {**begun, "status": "queued"}
        events[:1] = [("created", queued), ("queued", queued)]
    return b"".join(
        [_frame(f"response.{kind}", number, response=one) for number, (kind, one) in enumerate(events)]
    )


# Of each kind of item: the prefix of its ids, and that of its events' types.
_KINDS: Final = {
    "message": ("msg", "response.output_text"),
    "reasoning": ("rs", "response.reasoning_text"),
    ToolKind.FUNCTION: ("fc", "response.function_call_arguments"),
    ToolKind.CUSTOM: ("ctc", "response.custom_tool_call_input"),
}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _frame(kind: str, number: int, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (
        kind.encode(),
        orjson.dumps({"type": kind, "sequence_number": number, **fields}),
    )


class ResponsesDialect(ContractDialect):
    """OpenAI's Responses, as the HTTP edge uses it."""

    def parse(self, body: bytes, origin: RequestOrigin) -> ParsedRequest:
        return responses_request(parse(ResponsesBody, body), origin)

    def whole(self, asked: ParsedRequest, answer: Answer) -> bytes:
        own = cast("ResponsesRequest", asked)
        return orjson.dumps(whole_response(own, answer))

    def frames(
        self, asked: ParsedRequest, model: str | None = None, plan: Plan | None = None, cached_tokens: int = 0
    ) -> ResponseFrames:
        return ResponseFrames(cast("ResponsesRequest", asked), model or asked.request.model or "")

    error = staticmethod(error_json)
