"""Anthropic's stream of blocks, and the dialect."""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from budgeting.values import Plan
from gateway.contracts.answer import Answer
from gateway.contracts.dialect import ContractDialect, ParsedRequest
from gateway.contracts.events import Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.messages.answer import (
    message_head,
    message_json,
    message_usage,
    messages_error,
    messages_error_json,
    shown_call_id,
    signature_of,
    stop_reason,
)
from gateway.contracts.messages.body import MessagesRequest
from gateway.contracts.messages.request import messages_request
from gateway.contracts.openai_answer import sluice_body
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import parse
from gateway.contracts.values import Usage
from gateway.errors import PublicError

_TEXT: Final = {"type": "text", "text": ""}
_THINKING: Final = {"type": "thinking", "thinking": "", "signature": ""}


class BlockFrames:
    """The events of one stream: consecutive blocks, of which one is open at a time.

    A text block opens with the first text that is not blank, because a client's tool loop would end at an
    empty one. Blanks before it are held back until then. ``usage`` is the prompt's, as far as it is known
    when the stream opens.
    """

    around: Final = None
    ping: Final = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, asked: ParsedRequest, model: str, usage: Usage) -> None:
        self._asked = asked
        self.opening = event("message_start", {"message": message_head(asked, model, usage)})
        self._block: str | None = None
        self._index = -1
        self._held = ""
        self._prefix = b""

    def delta(self, delta: Delta) -> bytes:
        """An event around one JSON string: no object is built per token. There is only one choice."""
        if self._block == "text":
            return self._prefix + orjson.dumps(delta.text) + b"}}\n\n"
        text = self._held + delta.text
        self._held = "" if text.strip() else text
        if self._held or not text:
            return b""
        return self._opened(_TEXT) + self._prefix + orjson.dumps(text) + b"}}\n\n"

    def event(self, one: Delta) -> bytes:
        match one:
            case Reasoning() if one.text:
                opened = b"" if self._block == "thinking" else self._opened(_THINKING)
                return opened + self._piece("thinking_delta", "thinking", one.text)
            case ToolBegin():
                block = {"type": "tool_use", "id": shown_call_id(one.id), "name": one.text, "input": {}}
                return self._opened(block)
            case ToolArgs():
                return self._piece("input_json_delta", "partial_json", one.text)
            case ToolEnd():
                return self._closed()
            case _:
                return b""

    def finish(self, answer: Answer) -> bytes:
        body = {
            "delta": {"stop_reason": stop_reason(self._asked, answer), "stop_sequence": answer.stop_sequence},
            "usage": message_usage(answer.usage),
            "sluice": sluice_body(answer),
        }
        return self._closed() + event("message_delta", body) + event("message_stop", {})

    def fail(self, error: PublicError, request_id: str) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(messages_error(error, request_id)) + b"\n\n"

    def _opened(self, block: Mapping[str, Any]) -> bytes:
        """The end of the open block and the start of ``block``."""
        closed = self._closed()
        self._block = block["type"]
        self._index += 1
        self._prefix = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"text_delta","text":' % self._index
        )
        return closed + event("content_block_start", {"index": self._index, "content_block": block})

    def _closed(self) -> bytes:
        if self._block is None:
            return b""
        signed = b""
        if self._block == "thinking":
            signed = self._piece("signature_delta", "signature", signature_of(self._asked))
        self._block = None
        return signed + event("content_block_stop", {"index": self._index})

    def _piece(self, kind: str, field: str, text: str) -> bytes:
        return event("content_block_delta", {"index": self._index, "delta": {"type": kind, field: text}})


def event(kind: str, body: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **body}))


class MessagesDialect(ContractDialect):
    """Anthropic's Messages, as the HTTP edge uses it."""

    def parse(self, body: bytes, origin: RequestOrigin) -> ParsedRequest:
        return messages_request(parse(MessagesRequest, body), origin)

    def whole(self, asked: ParsedRequest, answer: Answer) -> bytes:
        return message_json(asked, answer)

    def frames(
        self, asked: ParsedRequest, model: str | None = None, plan: Plan | None = None, cached_tokens: int = 0
    ) -> BlockFrames:
        tokens = 0 if plan is None else plan.counts.total
        usage = Usage(tokens, 0, min(cached_tokens, tokens))
        return BlockFrames(asked, model or asked.request.model or "", usage)

    error = staticmethod(messages_error_json)
