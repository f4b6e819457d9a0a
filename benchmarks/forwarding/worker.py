"""The fake worker: answers OpenAI chat completions as fast as Python can, as a process of its own.

    python -m benchmarks.forwarding.worker PORT [MODEL...]

Every answer is encoded in advance; only the ticket is filled in. Streams advance like those of an engine: one
step gives each of them one token, in one write each, or, like vLLM when a request sets ``stream_interval``,
one write per interval. Steps are ``step_ms`` apart, or follow each other at once for 0, and the first token
comes after ``prefill_ms``. ``POST /control {"step_ms": 10}`` sets these times. Requests are parsed by hand:
the worker reads what the gateways send (a length, no chunks, no pipelining), and refuses the rest.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from typing import cast

import uvloop

from benchmarks.forwarding.workload import (
    ANSWER_TOKENS,
    ANSWER_WORDS,
    LEAST_PROMPT_BYTES,
    MODEL,
    TICKET_BYTES,
    TICKET_MARK,
    answer_text,
)

CREATED = 1_700_000_000
PROMPT_TOKENS = 2_000
CACHED_TOKENS = 1_900
MAX_REQUEST_BYTES = 1 << 20
BACKLOG = 1024
NO_TICKET = b"-" * TICKET_BYTES

_USAGE = {
    "prompt_tokens": PROMPT_TOKENS,
    "completion_tokens": ANSWER_TOKENS,
    "total_tokens": PROMPT_TOKENS + ANSWER_TOKENS,
    "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
}
_HOLE = "\0" * TICKET_BYTES


def _dumps(value: object) -> bytes:
    # The unescaped hole is as long as a ticket, so that lengths stay right when it is filled.
    return (
        json.dumps(value, separators=(",", ":")).encode().replace(rb"\u0000" * TICKET_BYTES, _HOLE.encode())
    )


def _reply(body: bytes, *, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


def _event(choices: list[object], usage: object = None) -> bytes:
    """Encode one SSE event in one HTTP chunk."""
    head = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": CREATED, "model": MODEL}
    event = b"data: " + _dumps(head | {"choices": choices, "usage": usage}) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def _delta(delta: dict[str, str], finish_reason: str | None = None, usage: object = None) -> bytes:
    return _event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}], usage)


_WHOLE = _reply(
    _dumps(
        {
            "id": "chatcmpl-0", "object": "chat.completion", "created": CREATED, "model": MODEL,
            "choices": [
                {
                    "index": 0, "message": {"role": "assistant", "content": answer_text(_HOLE)},
                    "logprobs": None, "finish_reason": "stop",
                }
            ],
            "usage": _USAGE,
        }
    )
).split(_HOLE.encode())  # fmt: skip
_INTERVAL = re.compile(rb'"stream_interval": ?(\d{1,4})')
_CONTINUOUS = re.compile(rb'"continuous_usage_stats": ?true')
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
# The role is sent with the first token: the benchmark measures the time to text.
_FIRST = (_STREAM_HEAD + _delta({"role": "assistant", "content": ""}) + _delta({"content": _HOLE})).split(
    _HOLE.encode()
)
_STOP = _delta({}, "stop")
_USAGE_EVENT = _event([], _USAGE)
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _writes(interval: int, counted: bool) -> tuple[bytes, ...]:
    """Return what is written at each step after the first token; empty between two pieces of several tokens.

    ``counted``: each chunk has the number of tokens so far (vLLM's ``continuous_usage_stats``).
    """
    writes = [b""] * len(ANSWER_WORDS)
    for start in range(0, len(ANSWER_WORDS), interval):
        words = ANSWER_WORDS[start : start + interval]
        so_far = 1 + start + len(words)
        usage = {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": so_far,
            "total_tokens": PROMPT_TOKENS + so_far,
        }
        writes[start + len(words) - 1] = _delta({"content": "".join(words)}, usage=usage if counted else None)
    return tuple(writes)


class Engine:
    """Advances all streams, one token in each step."""

    def __init__(self, loop: asyncio.AbstractEventLoop, models: Sequence[str] = (MODEL,)) -> None:
        self._loop = loop
        self.models = models
        self._streams: dict[ServedConnection, None] = {}
        self._stepping = False
        self.step_s = self.prefill_s = 0.0
        self.running = 0
        self.trimmed = 0
        self._writes: dict[tuple[int, bool], tuple[bytes, ...]] = {}

    def add(self, stream: ServedConnection) -> None:
        """Advance the stream from the next step on."""
        self._streams[stream] = None
        if not self._stepping:
            self._stepping = True
            self._next()

    def writes(self, body: bytes) -> tuple[bytes, ...]:
        """What is written at each step for this request."""
        asked = _INTERVAL.search(body)
        # An interval is at most the whole answer, so that the number of cached kinds is bounded.
        interval = min(max(1, int(asked[1])), len(ANSWER_WORDS)) if asked else 1
        kind = interval, _CONTINUOUS.search(body) is not None
        if kind not in self._writes:
            self._writes[kind] = _writes(*kind)
        return self._writes[kind]

    def drop(self, stream: ServedConnection) -> None:
        """Remove a stream that has ended or whose connection is closed."""
        self._streams.pop(stream, None)

    def _next(self) -> None:
        if self.step_s:
            self._loop.call_later(self.step_s, self._step)
        else:
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        for stream in list(self._streams):
            stream.step()
        self._stepping = bool(self._streams)
        if self._stepping:
            self._next()

    def metrics(self) -> bytes:
        """Return the load metrics of a vLLM worker."""
        labels = f'{{engine="0",model_name="{MODEL}"}}'
        cache = '{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="65536"}'
        values = {
            f"vllm:num_requests_running{labels}": self.running,
            f"vllm:num_requests_waiting{labels}": 0,
            f"vllm:kv_cache_usage_perc{labels}": 0.1,
            f"vllm:num_preemptions_total{labels}": 0,
            f"vllm:prefix_cache_queries_total{labels}": 0,
            f"vllm:prefix_cache_hits_total{labels}": 0,
            f"vllm:cache_config_info{cache}": 1,
        }
        return "".join(f"{name} {value}\n" for name, value in values.items()).encode()


class ServedConnection(asyncio.Protocol):
    """One connection from a gateway."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._got = b""
        self._needed = 0
        self._place = -1
        self._with_usage = False
        self._writes: tuple[bytes, ...] = ()
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports have the methods, not the class.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """End the stream of a closed connection."""
        self._transport = None
        if self._place >= 0:
            self._end()

    def pause_writing(self) -> None:
        """Skip the steps of a slow reader; its stream goes on later."""
        self._paused = True

    def resume_writing(self) -> None:
        """Continue with the next step."""
        self._paused = False

    def data_received(self, data: bytes) -> None:
        """Collect one request, then answer it."""
        self._got = self._got + data if self._got else data
        if len(self._got) < self._needed:
            return
        head_end = self._got.find(b"\r\n\r\n")
        if head_end < 0:
            self._needed = len(self._got) + 1
            return
        head = self._got[:head_end]
        length = _content_length(head)
        self._needed = head_end + 4 + length
        if length < 0 or self._needed > MAX_REQUEST_BYTES:
            self._write(_reply(b"", status="411 Length Required"))
            self._close()
        elif len(self._got) >= self._needed:
            body, self._got = self._got[head_end + 4 : self._needed], self._got[self._needed :]
            self._needed = 0
            self._answer(head, body)

    def step(self) -> None:
        """Write one token more, or the end."""
        if self._paused:
            return
        if self._place < len(self._writes):
            if not self._engine.step_s:
                # Tokens take no time here: go on to the next piece.
                while not self._writes[self._place]:
                    self._place += 1
            if piece := self._writes[self._place]:
                self._write(piece)
            self._place += 1
        else:
            self._write(_STOP + (_USAGE_EVENT if self._with_usage else b"") + _DONE)
            self._end()

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"POST /v1/chat/completions "):
            self._generate(body)
        elif head.startswith(b"POST /control "):
            control = json.loads(body)
            self._engine.step_s = control["step_ms"] / 1000
            self._engine.prefill_s = control.get("prefill_ms", 0) / 1000
            self._write(_reply(b"{}"))
        elif head.startswith(b"GET /control "):
            self._write(_reply(json.dumps({"trimmed": self._engine.trimmed}).encode()))
        elif head.startswith(b"GET /health "):
            self._write(_reply(b""))
        elif head.startswith(b"GET /v1/models "):
            cards = [
                {"id": model, "object": "model", "created": CREATED, "owned_by": "", "max_model_len": 32_768}
                for model in self._engine.models
            ]
            self._write(_reply(_dumps({"object": "list", "data": cards})))
        elif head.startswith(b"GET /metrics "):
            self._write(_reply(self._engine.metrics(), content_type="text/plain; version=0.0.4"))
        else:
            self._write(_reply(b'{"error":{"message":"unknown path"}}', status="404 Not Found"))

    def _generate(self, body: bytes) -> None:
        if len(body) < LEAST_PROMPT_BYTES:
            self._engine.trimmed += 1
        mark = body.rfind(TICKET_MARK)
        ticket = body[mark + len(TICKET_MARK) :][:TICKET_BYTES] if mark >= 0 else NO_TICKET
        if b'"stream":true' not in body and b'"stream": true' not in body:
            self._write(ticket.join(_WHOLE))
            return
        self._with_usage = b"include_usage" in body
        self._writes = self._engine.writes(body)
        self._place = 0
        self._engine.running += 1
        if self._engine.prefill_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self._engine.prefill_s, self._begin, ticket.join(_FIRST))
        else:
            self._begin(ticket.join(_FIRST))

    def _begin(self, first: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._write(first)
            self._engine.add(self)

    def _end(self) -> None:
        self._place = -1
        self._engine.running -= 1
        self._engine.drop(self)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _content_length(head: bytes) -> int:
    """The body's length; 0 without the header, -1 for a body in chunks."""
    lower = head.lower()
    at = lower.find(b"\r\ncontent-length:")
    if at < 0:
        return -1 if b"\r\ntransfer-encoding:" in lower else 0
    end = lower.find(b"\r\n", at + 2)
    return int(lower[at + len(b"\r\ncontent-length:") : end if end >= 0 else len(lower)])


async def serve(port: int, models: Sequence[str] = (MODEL,)) -> None:
    """Serve on the loopback interface until cancelled, and list ``models``."""
    loop = asyncio.get_running_loop()
    engine = Engine(loop, models)
    server = await loop.create_server(lambda: ServedConnection(engine), "127.0.0.1", port, backlog=BACKLOG)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2:] or (MODEL,)))
