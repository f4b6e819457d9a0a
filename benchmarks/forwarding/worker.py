"""The fake worker: answers OpenAI chat completions as fast as Python can, as a process of its own.

    python -m benchmarks.forwarding.worker PORT [MODEL...] [--tokenizer FOLDER]

With a tokenizer it answers ``/tokenize``, takes prompts as token ids, and sends the ids of prompt and answer
when a request sets ``return_token_ids``, as vLLM does.

Every answer is encoded in advance; only the ticket is filled in. Streams advance like those of an engine: one
step gives each of them one token, in one write each, or, like vLLM when a request sets ``stream_interval``,
one write per interval. Steps are ``step_ms`` apart, or follow each other at once for 0, and the first token
comes after ``prefill_ms``. ``POST /control {"step_ms": 10}`` sets these times. Requests are parsed by hand:
the worker reads what the gateways send (a length, no chunks, no pipelining), and refuses the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec
import uvloop

from benchmarks.forwarding.workload import (
    ANSWER_TOKENS,
    ANSWER_WORDS,
    LEAST_PROMPT_BYTES,
    LEAST_PROMPT_TOKENS,
    MODEL,
    TICKET_BYTES,
    TICKET_MARK,
    answer_text,
)
from budgeting.counting import ChatTokenizer
from budgeting.values import Message, Role
from ops.replay.text import WORDS

CREATED = 1_700_000_000
PROMPT_TOKENS = 2_000
CACHED_TOKENS = 1_900
MAX_REQUEST_BYTES = 1 << 20
BACKLOG = 1024
NO_TICKET = b"-" * TICKET_BYTES
TICKET_IDS = (999,)
# One id for each word, and the same for the same word: repeated ids would be a degenerate answer.
WORD_IDS = tuple(1000 + WORDS.index(word[1:]) for word in ANSWER_WORDS)

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


class Shape(NamedTuple):
    """What the chunks of a stream look like."""

    interval: int = 1  # tokens in a chunk
    counted: bool = False  # each chunk has the number of tokens so far (``continuous_usage_stats``)
    text: bool = False  # of ``/v1/completions``
    ids: bool = False  # with token ids (``return_token_ids``)


def _event(choices: list[object], usage: object = None, *, text: bool = False, **more: object) -> bytes:
    """Encode one SSE event in one HTTP chunk."""
    kind = ("cmpl-0", "text_completion") if text else ("chatcmpl-0", "chat.completion.chunk")
    head = {"id": kind[0], "object": kind[1], "created": CREATED, "model": MODEL}
    return _chunked(b"data: " + _dumps(head | {"choices": choices, "usage": usage} | more) + b"\n\n")


def _chunked(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def _piece(
    shape: Shape, content: str, ids: Sequence[int], usage: object = None, reason: str | None = None
) -> bytes:
    """Encode one piece of an answer; the last one has a ``reason`` and no text."""
    choice: dict[str, object] = {"index": 0}
    if shape.text:
        choice |= {"text": content}
    else:
        choice |= {"delta": {} if reason else {"content": content}}
    choice |= {"logprobs": None, "finish_reason": reason}
    if shape.ids:
        choice["token_ids"] = ids
    return _event([choice], usage, text=shape.text)


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
_TOKEN_IDS = re.compile(rb'"return_token_ids": ?true')
_PROMPT_IDS = re.compile(rb'"prompt": ?\[([0-9, ]+)\]')
_CONTINUOUS = re.compile(rb'"continuous_usage_stats": ?true')
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_USAGE_EVENTS = {text: _event([], _USAGE, text=text) for text in (False, True)}
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Writes(NamedTuple):
    """What is written for a stream: the first token, each step after it, and the end.

    ``first`` is cut where the ticket belongs, and before it where the prompt's ids belong; a step between two
    pieces of several tokens is empty.
    """

    first: list[bytes]
    echo: list[bytes] | None
    steps: tuple[bytes, ...]
    stop: bytes


def _writes(shape: Shape) -> Writes:
    steps = [b""] * len(ANSWER_WORDS)
    for start in range(0, len(ANSWER_WORDS), shape.interval):
        words = ANSWER_WORDS[start : start + shape.interval]
        so_far = 1 + start + len(words)
        usage = {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": so_far,
            "total_tokens": PROMPT_TOKENS + so_far,
        }
        last, ids = start + len(words) - 1, WORD_IDS[start : start + len(words)]
        steps[last] = _piece(shape, "".join(words), ids, usage if shape.counted else None)
    # The role, or the prompt's ids, are sent with the first token: the benchmark measures the time to text.
    role: list[object] = [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    echo: list[bytes] | None = None
    first = _piece(shape, _HOLE, TICKET_IDS)
    if shape.ids:
        shown: list[object] = [{"index": 0, "text": "", "prompt_token_ids": [_HOLE]}] if shape.text else role
        more = {} if shape.text else {"prompt_token_ids": [_HOLE]}
        event = _event(shown, text=shape.text, **more)
        echo = event[event.index(b"\r\n") + 2 : -2].split(b'"%b"' % _HOLE.encode())
    elif not shape.text:
        first = _event(role) + first
    stop = _piece(shape, "", (), reason="stop")
    return Writes(first.split(_HOLE.encode()), echo, tuple(steps), stop)


class _TokenizeMessage(msgspec.Struct):
    role: str
    content: str


class _Tokenize(msgspec.Struct):
    messages: list[_TokenizeMessage]


class Engine:
    """Advances all streams, one token in each step."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        models: Sequence[str] = (MODEL,),
        tokenizer: ChatTokenizer | None = None,
    ) -> None:
        self._loop = loop
        self.models = models
        self.tokenizer = tokenizer
        self._streams: dict[ServedConnection, None] = {}
        self._stepping = False
        self.step_s = self.prefill_s = 0.0
        self.running = 0
        self.trimmed = 0
        self._writes: dict[Shape, Writes] = {}

    def add(self, stream: ServedConnection) -> None:
        """Advance the stream from the next step on."""
        self._streams[stream] = None
        if not self._stepping:
            self._stepping = True
            self._next()

    def writes(self, body: bytes, *, text: bool) -> Writes:
        """What is written for this request."""
        asked = _INTERVAL.search(body)
        # An interval is at most the whole answer, so that the number of cached shapes is bounded.
        interval = min(max(1, int(asked[1])), len(ANSWER_WORDS)) if asked else 1
        ids = self.tokenizer is not None and _TOKEN_IDS.search(body) is not None
        shape = Shape(interval, _CONTINUOUS.search(body) is not None, text, ids)
        if shape not in self._writes:
            self._writes[shape] = _writes(shape)
        return self._writes[shape]

    def tokenized(self, body: bytes) -> bytes:
        """The answer of ``/tokenize``."""
        assert self.tokenizer is not None
        messages = msgspec.json.decode(body, type=_Tokenize).messages
        ids = self.tokenizer.encode_chat([Message(Role(one.role), one.content) for one in messages])
        return _reply(_dumps({"count": len(ids), "max_model_len": 32_768, "tokens": ids}))

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
        self._end_of_stream = b""
        self._steps: tuple[bytes, ...] = ()
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
        if self._place < len(self._steps):
            if not self._engine.step_s:
                # Tokens take no time here: go on to the next piece.
                while not self._steps[self._place]:
                    self._place += 1
            if piece := self._steps[self._place]:
                self._write(piece)
            self._place += 1
        else:
            self._write(self._end_of_stream)
            self._end()

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"POST /v1/chat/completions "):
            self._generate(body)
        elif self._engine.tokenizer is not None and head.startswith(b"POST /v1/completions "):
            self._complete(body, self._engine.tokenizer)
        elif self._engine.tokenizer is not None and head.startswith(b"POST /tokenize "):
            self._write(self._engine.tokenized(body))
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
        self._stream(body, ticket)

    def _complete(self, body: bytes, tokenizer: ChatTokenizer) -> None:
        """Answer a prompt of token ids with a stream."""
        found = _PROMPT_IDS.search(body)
        if found is None:
            self._write(_reply(b'{"error":{"message":"no token ids"}}', status="400 Bad Request"))
            return
        if found[1].count(b",") < LEAST_PROMPT_TOKENS:
            self._engine.trimmed += 1
        # Two characters a token at least, and the markup behind the last message.
        last = found[1].split(b",")[-4 * TICKET_BYTES :]
        text = tokenizer.decode(list(map(int, last))).encode()
        at = text.rfind(TICKET_MARK) + len(TICKET_MARK)
        self._stream(body, text[at : at + TICKET_BYTES], found[1])

    def _stream(self, body: bytes, ticket: bytes, prompt: bytes | None = None) -> None:
        writes = self._engine.writes(body, text=prompt is not None)
        usage = _USAGE_EVENTS[prompt is not None] if b"include_usage" in body else b""
        self._steps, self._end_of_stream = writes.steps, writes.stop + usage + _DONE
        self._place = 0
        self._engine.running += 1
        first = ticket.join(writes.first)
        if writes.echo is not None:
            # A chat's ids are not known here: as many as its text would have.
            first = _chunked((prompt or b",".join([b"1000"] * (len(body) // 4))).join(writes.echo)) + first
        first = _STREAM_HEAD + first
        if self._engine.prefill_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self._engine.prefill_s, self._begin, first)
        else:
            self._begin(first)

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


async def serve(port: int, models: Sequence[str] = (MODEL,), tokenizer: ChatTokenizer | None = None) -> None:
    """Serve on the loopback interface until cancelled, and list ``models``."""
    loop = asyncio.get_running_loop()
    engine = Engine(loop, models, tokenizer)
    server = await loop.create_server(lambda: ServedConnection(engine), "127.0.0.1", port, backlog=BACKLOG)
    await server.serve_forever()


if __name__ == "__main__":
    _parser = argparse.ArgumentParser()
    _parser.add_argument("port", type=int)
    _parser.add_argument("models", nargs="*")
    _parser.add_argument("--tokenizer")
    _given = _parser.parse_args()
    uvloop.run(
        serve(
            _given.port,
            _given.models or (MODEL,),
            None if _given.tokenizer is None else ChatTokenizer(_given.tokenizer),
        )
    )
