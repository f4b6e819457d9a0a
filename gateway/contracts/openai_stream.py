"""OpenAI's stream of chunks, written around one JSON string a token, and the two dialects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from gateway.contracts.dialect import Asked, Header
from gateway.contracts.openai import ChatRequest, CompletionRequest, chat_request, completion_request
from gateway.contracts.openai_answer import (
    FINISH_REASONS,
    completion_json,
    error_body,
    error_json,
    sluice_body,
    trimmed_header,
    usage_body,
)
from gateway.contracts.origin import Origin
from gateway.contracts.refusals import parse
from gateway.contracts.values import Answer
from gateway.errors import PublicError

DONE: Final = b"data: [DONE]\n\n"


class ChunkFrames:
    """The chunks of one stream.

    Everything that is the same in every chunk is encoded once; with ``include_usage`` each chunk says
    ``"usage":null`` and one more chunk, without choices, says the usage. The last chunk carries ``sluice``.
    A broken stream ends with OpenAI's error object and no ``[DONE]``.
    """

    def __init__(self, asked: Asked, *, id: str, object: str, chat: bool) -> None:
        request = asked.request
        head = orjson.dumps(
            {"id": id, "object": object, "created": request.created, "model": request.model or ""}
        )
        self._usage = asked.include_usage
        self._base = b"data: " + head[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if asked.include_usage else b"}\n\n"
        self._chat = chat
        open_text = b'"delta":{"content":' if chat else b'"text":'
        close_text = b"}" if chat else b""
        self._prefix = self._base + b'{"index":0,' + open_text
        self._suffix = close_text + b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._opening = (
            self._base
            + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            + self._tail
            if chat
            else b""
        )

    @property
    def opening(self) -> bytes:
        """In a chat, the chunk that carries the role."""
        return self._opening

    def delta(self, text: str) -> bytes:
        """One chunk around one JSON string: no object is built per token."""
        return self._prefix + orjson.dumps(text) + self._suffix

    def finish(self, answer: Answer) -> bytes:
        """The chunk with the finish reason, the usage if asked for, and ``[DONE]``."""
        empty = b'"delta":{}' if self._chat else b'"text":""'
        reason = orjson.dumps(FINISH_REASONS[answer.finish_reason])
        closing = self._base + b'{"index":0,' + empty + b',"logprobs":null,"finish_reason":' + reason + b"}]"
        extra = b',"sluice":' + orjson.dumps(sluice_body(answer)) + b"}\n\n"
        if not self._usage:
            return closing + extra + DONE
        usage = orjson.dumps(usage_body(answer.usage))
        return closing + self._tail + self._base + b'],"usage":' + usage + extra + DONE

    def fail(self, error: PublicError, request_id: str, *, partial: bool) -> bytes:
        """OpenAI's error object as an event, which its clients raise."""
        return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"


def _headers(answer: Answer) -> Sequence[Header]:
    trimmed = trimmed_header(answer)
    return () if trimmed is None else ((b"x-sluice-trimmed", trimmed),)


class ChatDialect:
    """``POST /v1/chat/completions``, as the HTTP edge uses it."""

    def parse(self, body: bytes, origin: Origin) -> Asked:
        """Raises InvalidRequest (InvalidJson when the body is not JSON)."""
        return chat_request(parse(ChatRequest, body), origin)

    def whole(self, asked: Asked, answer: Answer) -> bytes:
        """A ``chat.completion``."""
        return completion_json(
            answer,
            id=f"chatcmpl-{answer.generation_id}",
            object="chat.completion",
            model=asked.request.model or answer.model,
            choice={
                "index": 0,
                "message": {"role": "assistant", "content": answer.output_text, "refusal": None},
                "logprobs": None,
                "finish_reason": FINISH_REASONS[answer.finish_reason],
            },
        )

    def headers(self, answer: Answer) -> Sequence[Header]:
        """``x-sluice-trimmed`` when something was left out."""
        return _headers(answer)

    def frames(self, asked: Asked) -> ChunkFrames:
        """A stream of ``chat.completion.chunk``."""
        id = f"chatcmpl-{asked.request.generation_id}"
        return ChunkFrames(asked, id=id, object="chat.completion.chunk", chat=True)

    def error(self, error: PublicError, request_id: str) -> tuple[int, bytes]:
        """OpenAI's error object."""
        return error_json(error, request_id)


class CompletionDialect:
    """``POST /v1/completions``, as the HTTP edge uses it."""

    def parse(self, body: bytes, origin: Origin) -> Asked:
        """Raises InvalidRequest (InvalidJson when the body is not JSON)."""
        return completion_request(parse(CompletionRequest, body), origin)

    def whole(self, asked: Asked, answer: Answer) -> bytes:
        """A ``text_completion``."""
        return completion_json(
            answer,
            id=f"cmpl-{answer.generation_id}",
            object="text_completion",
            model=asked.request.model or answer.model,
            choice={
                "index": 0,
                "text": answer.output_text,
                "logprobs": None,
                "finish_reason": FINISH_REASONS[answer.finish_reason],
            },
        )

    def headers(self, answer: Answer) -> Sequence[Header]:
        """``x-sluice-trimmed`` when something was left out."""
        return _headers(answer)

    def frames(self, asked: Asked) -> ChunkFrames:
        """A stream of ``text_completion`` objects."""
        id = f"cmpl-{asked.request.generation_id}"
        return ChunkFrames(asked, id=id, object="text_completion", chat=False)

    def error(self, error: PublicError, request_id: str) -> tuple[int, bytes]:
        """OpenAI's error object."""
        return error_json(error, request_id)
