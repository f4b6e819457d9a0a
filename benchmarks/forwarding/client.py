"""One keep-alive connection of the load generator: sends a request, times its answer and checks all of it.

Written by hand over an ``asyncio.Protocol``: the client's CPU time is taken from the worker on the same core.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from benchmarks.forwarding.workload import ANSWER_TOKENS

# Occurs once in every event that may carry text.
CONTENT_MARK = b'"content":'
_TEXT = re.compile(rb'"content":\s*"[^"]')
_LAST_CHUNK = b"0\r\n\r\n"
_UNKNOWN = -1
_CHUNKED = -2


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request ended; times in seconds on :func:`time.perf_counter`'s clock.

    Attributes:
        first_at: when the first text of a stream arrived.
        text: the whole answer's text, ``None`` when ``fault`` says what was wrong.
        events: events of a stream that carried text.
        marks: how often :data:`CONTENT_MARK` occurs in a stream.
    """

    done_at: float
    first_at: float | None = None
    text: str | None = None
    events: int = 0
    marks: int = 0
    fault: str | None = None


class Connection(asyncio.Protocol):
    """One connection; one request at a time.

    Args:
        ended: called with the answer when a request has ended; the connection can take the next request if it
            is still open.
        seen: called with the number of :data:`CONTENT_MARK` in the bytes of a stream that have just arrived.
    """

    def __init__(self, ended: Callable[[Connection, Answer], None], seen: Callable[[int], None]) -> None:
        self._ended = ended
        self._seen = seen
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._length = _UNKNOWN
        self._stream = False
        self._first_at: float | None = None
        self.busy = False

    @property
    def open(self) -> bool:
        """Return whether the server has not closed the connection."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, *, stream: bool) -> None:
        """Send one request, head and body."""
        assert self._transport is not None and not self.busy
        self.busy, self._stream = True, stream
        self._parts, self._size, self._length, self._first_at = [], 0, _UNKNOWN, None
        self._transport.write(request)

    def close(self) -> None:
        """Close the connection; an answer in flight is no longer waited for."""
        self.busy = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports have the methods, not the class.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Report an incomplete answer as failed."""
        self._transport = None
        if self.busy:
            self._end(Answer(time.perf_counter(), fault="connection closed before the answer's end"))

    def data_received(self, data: bytes) -> None:
        """Collect bytes until the answer is complete."""
        if not self.busy:
            return
        if self._stream:
            self._seen(data.count(CONTENT_MARK))
            if self._first_at is None and _TEXT.search(data):
                self._first_at = time.perf_counter()
        self._parts.append(data)
        self._size += len(data)
        if self._length == _UNKNOWN:
            self._read_head()
        if self._length >= 0:
            whole = self._size >= self._length
        else:
            # No answer contains text that ends like the last chunk of a body.
            tail = data if len(data) >= len(_LAST_CHUNK) else b"".join(self._parts[-len(_LAST_CHUNK) :])
            whole = self._length == _CHUNKED and tail.endswith(_LAST_CHUNK)
        if whole:
            now = time.perf_counter()
            self._end(read_answer(b"".join(self._parts), self._stream, now, self._first_at))

    def _read_head(self) -> None:
        """Set the length of the whole answer, head included, once the head has arrived."""
        got = b"".join(self._parts)
        self._parts = [got]
        end = got.find(b"\r\n\r\n")
        if end < 0:
            return
        head = got[:end].lower()
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            self._length = end + 4 + int(head[at + 17 :].split(b"\r\n", 1)[0])
        else:
            self._length = _CHUNKED

    def _end(self, answer: Answer) -> None:
        self.busy = False
        self._ended(self, answer)


def read_answer(raw: bytes, stream: bool, done_at: float, first_at: float | None) -> Answer:
    """The text of a whole HTTP answer, or what is wrong with it."""
    head, _, body = raw.partition(b"\r\n\r\n")
    try:
        if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
            return Answer(done_at, fault=f"status {head[9:12].decode()}: {body[:200]!r}")
        if b"\r\ntransfer-encoding: chunked" in head.lower():
            body = b"".join(_chunks(body))
        if stream:
            text, events = _streamed(body)
        else:
            answer = json.loads(body)
            text, events = answer["choices"][0]["message"]["content"], 1
            _check_usage(answer["usage"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return Answer(done_at, fault=f"{type(error).__name__}: {error}: {body[:200]!r}")
    return Answer(done_at, first_at, text, events, body.count(CONTENT_MARK))


def _chunks(body: bytes) -> list[bytes]:
    chunks: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            return chunks
        chunks.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


# The text of one event, without parsing its JSON: otherwise the load generator would be the busier one.
_CONTENT = re.compile(rb'"content":\s*"((?:[^"\\]|\\.)*)"')


def _streamed(body: bytes) -> tuple[str, int]:
    """Return the text, and the number of events that carry text; usage and the end are checked."""
    events = body.replace(b"\r\n", b"\n").split(b"\n\n")
    if events[-1] or events[-2] != b"data: [DONE]":
        raise ValueError("the stream does not end with [DONE]")
    pieces = [piece for piece in _CONTENT.findall(body) if piece]
    usage = next(event for event in reversed(events) if b'"usage":' in event and b"prompt_tokens" in event)
    _check_usage(json.loads(usage.removeprefix(b"data: "))["usage"])
    return json.loads(b'"' + b"".join(pieces) + b'"'), len(pieces)


def _check_usage(usage: dict[str, object]) -> None:
    if usage["completion_tokens"] != ANSWER_TOKENS:
        raise ValueError(f"completion_tokens is {usage['completion_tokens']}, not {ANSWER_TOKENS}")
