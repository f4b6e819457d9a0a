"""A stand-in for Bedrock: checks each request as the service does, and answers in the same encoding.

It speaks HTTP with chunks and keep-alive. Calls are scripted by region, which the stand-in reads from a
request's signature.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from benchmarks.bedrock.frames import event, exception, frame
from benchmarks.bedrock.requests import RequestChecker

ANSWER = ("Vinland", " Saga", " and", " Vagabond", " are", " both", " worth", " reading", ".")
# Substrings of the ids of models that do not continue an assistant message, and their error message.
WITHOUT_PREFILL = ("claude-opus-4-6", "claude-sonnet-4-6")
NO_PREFILL = (
    "This model does not support assistant message prefill. The conversation must end with a user message."
)
# The fields of InvokeModel's bodies for embeddings, and the token count reported for each text.
TITAN_FIELDS = ("inputText", "dimensions", "normalize")
COHERE_FIELDS = ("texts", "input_type", "embedding_types", "truncate", "output_dimension")
TOKENS_EACH = 3
# The longest scripted hang, in seconds, when the client does not close the connection.
LONGEST_HANG_S = 60.0


@dataclass(frozen=True)
class Behaviour:
    """The scripted behaviour of one call.

    Args:
        pieces: of the text.
        reasoning: pieces of the reasoning before the text.
        calls: tool calls after the text: each a name and the pieces of its arguments.
        delay_s: seconds before each piece.
        status: of the response; above 200 only the error follows.
        error: the error's code, or the type of the exception event in the stream.
        message: the error's text.
        retry_after: the header of that name.
        hang_before: send nothing at all.
        after: pieces sent before the ``fault`` breaks the stream; with all of them, the stop reason is too.
        fault: ``hang``, ``cut``, ``close``, ``exception``, ``garbage``, ``crc``, ``json``, ``no_usage`` or
            ``linger``.
        tokens: reported tokens of the answer; by default each piece is one, and each tool's name.
        stop_reason: the reported one; by default it follows from the pieces and ``maxTokens``.
        cache: prompt tokens read from the cache, and prompt tokens written to it.
    """

    pieces: tuple[str, ...] = ANSWER
    reasoning: tuple[str, ...] = ()
    calls: tuple[tuple[str, tuple[str, ...]], ...] = ()
    delay_s: float = 0.0
    status: int = 200
    error: str = ""
    message: str = "it does not work"
    retry_after: str | None = None
    hang_before: bool = False
    after: int = 2
    fault: str = ""
    tokens: int | None = None
    stop_reason: str | None = None
    cache: tuple[int, int] = (0, 0)


NORMAL = Behaviour()


@dataclass
class StandIn:
    """The state of the running server. ``model`` answers the calls that are not scripted."""

    url: str
    count_tokens: Callable[[dict[str, Any]], int]
    model: Callable[[dict[str, Any]], Behaviour] | None = None
    scripts: dict[str, deque[Behaviour]] = field(default_factory=dict)
    always: dict[str, Behaviour] = field(default_factory=dict)
    seen: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    checker: RequestChecker = field(default_factory=RequestChecker)
    keys: list[str] = field(default_factory=list)  # the key id of each call's signature
    open_connections: int = 0
    connections: int = 0
    active: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)

    def script(self, *behaviours: Behaviour, region: str = "us-east-1") -> None:
        """Script the next calls in a region."""
        self.scripts.setdefault(region, deque()).extend(behaviours)

    def behaviour(self, region: str) -> Behaviour:
        """Return the behaviour of a region's next call, and take it from the script."""
        with self.lock:
            queue = self.scripts.get(region)
            return queue.popleft() if queue else self.always.get(region, NORMAL)

    @property
    def regions(self) -> list[str]:
        """Return the region of each call."""
        return [region for region, _, _ in self.seen]

    @property
    def last(self) -> dict[str, Any]:
        """The last request."""
        return self.seen[-1][2]


def words_of(request: dict[str, Any]) -> int:
    """Count the words of a request: a token count without a tokenizer."""
    blocks = [*request.get("system", []), *(b for m in request["messages"] for b in m["content"])]
    return sum(len(block["text"].split()) for block in blocks if "text" in block)


@contextmanager
def stand_in(
    count_tokens: Callable[[dict[str, Any]], int] = words_of,
    tls: ssl.SSLContext | None = None,
    port: int = 0,
) -> Iterator[StandIn]:
    """Run a stand-in on ``port``, or on a free one."""
    server = _Server(("127.0.0.1", port), _Handler)
    scheme = "http"
    if tls is not None:
        scheme, server.socket = "https", tls.wrap_socket(server.socket, server_side=True)
    state = server.state = StandIn(f"{scheme}://127.0.0.1:{server.server_address[1]}", count_tokens)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        state.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    state: StandIn


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.server.state.lock:
            self.server.state.open_connections += 1
            self.server.state.connections += 1

    def finish(self) -> None:
        with self.server.state.lock:
            self.server.state.open_connections -= 1
        try:
            super().finish()
        except OSError:
            self.close_connection = True  # the client has closed the connection

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True  # the client has closed the connection

    def do_POST(self) -> None:
        state = self.server.state
        with state.lock:
            state.active += 1
        try:
            self._answer(state)
        finally:
            with state.lock:
                state.active -= 1

    def _answer(self, state: StandIn) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = re.fullmatch(r"(?:/[^/]+)*?/model/([^/]+)/(converse|converse-stream|invoke)", self.path)
        region = re.search(
            r"Credential=([^/]+)/\d+/([^/]+)/bedrock/aws4_request", self.headers["Authorization"] or ""
        )
        if found is None or region is None:
            return self._refuse(403, "MissingAuthenticationTokenException", "no signature, or no such path")
        operation = found[2]
        request = {"modelId": unquote(found[1]), **body}
        with state.lock:
            state.seen.append((region[2], operation, request))
            state.keys.append(region[1])
        act = state.behaviour(region[2])
        if act.hang_before:
            return self._hang()
        if act.status > 200:
            return self._refuse(act.status, act.error, act.message, act.retry_after)
        if operation == "invoke":
            return self._embed(request)
        faults = state.checker.faults(operation, request)
        if faults:
            return self._refuse(400, "ValidationException", "; ".join(faults))
        if prefill_of(request) and any(part in request["modelId"] for part in WITHOUT_PREFILL):
            return self._refuse(400, "ValidationException", NO_PREFILL)
        if act is NORMAL and state.model is not None:
            act = state.model(request)
            if act.hang_before:
                return self._hang()
            if act.status > 200:
                return self._refuse(act.status, act.error, act.message, act.retry_after)
        answer = _Answer(act, request, state.count_tokens(request))
        if operation == "converse":
            return self._send(200, answer.whole())
        self._stream(act, answer)

    def _embed(self, request: dict[str, Any]) -> None:
        """Answer like Titan and Cohere: the vector is the text as a number and 1/3; scores are 1 / length."""
        if "rerank" in request["modelId"]:
            return self._rank(request)
        titan = "titan" in request["modelId"]
        allowed = TITAN_FIELDS if titan else COHERE_FIELDS
        texts: list[Any] = [request.get("inputText")] if titan else request.get("texts", [])
        if not request.keys() <= {"modelId", *allowed} or not 0 < len(texts) <= 96 or not all(texts):
            return self._refuse(400, "ValidationException", "Malformed input request")
        vectors = [[float(text if text.isdigit() else len(text)), 1 / 3] for text in texts]
        if titan:
            return self._send(200, {"embedding": vectors[0], "inputTextTokenCount": TOKENS_EACH})
        if not {"input_type", "texts"} <= request.keys():
            return self._refuse(400, "ValidationException", "input_type is required")
        tokens = {"X-Amzn-Bedrock-Input-Token-Count": str(TOKENS_EACH * len(texts))}
        self._send(200, {"embeddings": {"float": vectors}, "response_type": "embeddings_by_type"}, tokens)

    def _rank(self, request: dict[str, Any]) -> None:
        cohere = "cohere." in request["modelId"]
        allowed = {"modelId", "query", "documents", "top_n", *(("api_version",) if cohere else ())}
        documents, top = request.get("documents", []), request.get("top_n", 0)
        whole = request.keys() == allowed and request["query"] and 0 < len(documents) <= 1_000
        if not whole or not 0 < top <= len(documents):
            return self._refuse(400, "ValidationException", "Malformed input request")
        ranked = [{"index": index, "relevance_score": 1 / len(text)} for index, text in enumerate(documents)]
        ranked.sort(key=lambda one: -one["relevance_score"])
        self._send(200, {"results": ranked[:top]})

    def _stream(self, act: Behaviour, answer: _Answer) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.amazon.eventstream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(event("messageStart", {"role": "assistant"}))
        last_block = None
        breaks = act.fault not in ("", "no_usage", "linger")
        for number, (block, delta) in enumerate(answer.pieces):
            if number == act.after and breaks:
                return self._break(act)
            if act.delay_s and self.server.state.stopping.wait(act.delay_s):
                return
            if block != last_block:
                if last_block is not None:
                    self._chunk(event("contentBlockStop", {"contentBlockIndex": last_block}))
                if block in answer.starts:
                    started = {"start": {"toolUse": answer.starts[block]}, "contentBlockIndex": block}
                    self._chunk(event("contentBlockStart", started))
                last_block = block
            self._chunk(event("contentBlockDelta", {"delta": delta, "contentBlockIndex": block}))
        self._chunk(event("contentBlockStop", {"contentBlockIndex": last_block or 0}))
        last = event("messageStop", {"stopReason": answer.stop_reason, **answer.fields})
        if breaks and act.after == len(answer.pieces):
            self._chunk(last)
            return self._break(act)
        if act.fault != "no_usage":
            last += event("metadata", {"usage": answer.usage, "metrics": {"latencyMs": 7}})
        self._chunk(last)
        if act.fault == "linger":
            return self._hang()
        self.wfile.write(b"0\r\n\r\n")

    def _break(self, act: Behaviour) -> None:
        piece = {"delta": {"text": "?"}, "contentBlockIndex": 0}
        match act.fault:
            case "hang":
                return self._hang()
            case "exception":
                self._chunk(exception(act.error, act.message))
                self.wfile.write(b"0\r\n\r\n")
                return
            case "close":  # a clean end, but too early
                self.wfile.write(b"0\r\n\r\n")
                return
            case "garbage":
                self._chunk(b"\x00\x00\x01\x00 this is no frame of any kind, however it is read")
            case "crc":
                self._chunk(event("contentBlockDelta", piece, crc_off_by=1))
            case "json":
                self._chunk(
                    frame({":event-type": "contentBlockDelta", ":message-type": "event"}, b"{no json")
                )
            case "cut":
                self.wfile.write(b"40\r\n" + event("contentBlockDelta", piece)[:20])
                self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _hang(self) -> None:
        """Send nothing more until the client closes the connection."""
        self.close_connection = True
        self.connection.settimeout(0.05)
        until = time.monotonic() + LONGEST_HANG_S
        while time.monotonic() < until and not self.server.state.stopping.is_set():
            try:
                if not self.connection.recv(1):
                    return
            except TimeoutError:
                continue

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _refuse(self, status: int, code: str, message: str, retry_after: str | None = None) -> None:
        headers = {"x-amzn-ErrorType": f"{code}:http://internal.amazon.com/coral/com.amazon.bedrock/"}
        if retry_after is not None:
            headers["Retry-After"] = retry_after
        self._send(status, {"message": message}, headers)

    def _send(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def prefill_of(request: dict[str, Any]) -> str:
    """Return the beginning of the answer that the request gives to the model."""
    last = request["messages"][-1]
    return "".join(block["text"] for block in last["content"]) if last["role"] == "assistant" else ""


def rest_of(pieces: tuple[str, ...], request: dict[str, Any]) -> tuple[str, ...]:
    """Return the scripted pieces after the partial answer, if that answer is a prefix of the script."""
    given, left = prefill_of(request), list(pieces)
    if not "".join(pieces).startswith(given):
        return pieces
    while given and left:
        first = left.pop(0)
        if len(first) > len(given):
            left.insert(0, first[len(given) :])
        given = given[len(first) :]
    return tuple(left)


class _Answer:
    """A scripted answer, cut at ``maxTokens`` (a piece is a token) and before a stop sequence."""

    def __init__(self, act: Behaviour, request: dict[str, Any], prompt_tokens: int) -> None:
        config = request.get("inferenceConfig", {})
        pieces: list[tuple[int, dict[str, Any]]] = [
            (0, {"reasoningContent": {"text": text}}) for text in act.reasoning
        ]
        if act.reasoning:
            pieces.append((0, {"reasoningContent": {"signature": "c2lnbmVk"}}))
        pieces += [(1, {"text": text}) for text in rest_of(act.pieces, request)]
        self.starts: dict[int, dict[str, str]] = {}
        for block, (name, fragments) in enumerate(act.calls, start=2):
            self.starts[block] = {"toolUseId": f"tooluse_{block - 2}", "name": name}
            pieces += [(block, {"toolUse": {"input": text}}) for text in fragments or ("",)]
        most = config.get("maxTokens", len(pieces))
        self.pieces = pieces[:most]
        self.stop_reason = "tool_use" if act.calls else "end_turn"
        self.fields: dict[str, Any] = {}
        if most < len(pieces):
            self.stop_reason = "max_tokens"
        for number, (_, piece) in enumerate(self.pieces):
            reached = [one for one in config.get("stopSequences", ()) if one in piece.get("text", "")]
            if reached:
                self.pieces, self.stop_reason = self.pieces[:number], "stop_sequence"
                if "/stop_sequence" in request.get("additionalModelResponseFieldPaths", ()):
                    self.fields = {"additionalModelResponseFields": {"stop_sequence": reached[0]}}
                break
        self.stop_reason = act.stop_reason or self.stop_reason
        names = len({block for block, _ in self.pieces if block in self.starts})
        tokens = len(self.pieces) + names if act.tokens is None else act.tokens
        read, written = act.cache
        self.usage = {
            "inputTokens": prompt_tokens - read - written,
            "outputTokens": tokens,
            "totalTokens": prompt_tokens + tokens,
            "cacheReadInputTokens": read,
            "cacheWriteInputTokens": written,
        }

    def whole(self) -> dict[str, Any]:
        """Return the response body of Converse."""
        content: list[dict[str, Any]] = []
        for block, group in itertools.groupby(self.pieces, lambda piece: piece[0]):
            deltas = [delta for _, delta in group]
            if block in self.starts:
                text = "".join([delta["toolUse"]["input"] for delta in deltas])
                content.append({"toolUse": {**self.starts[block], "input": json.loads(text or "{}")}})
            elif "text" in deltas[0]:
                content.append({"text": "".join([delta["text"] for delta in deltas])})
            else:
                text = "".join([delta["reasoningContent"].get("text", "") for delta in deltas])
                content.append({"reasoningContent": {"reasoningText": {"text": text, "signature": "c2ln"}}})
        return {
            "output": {"message": {"role": "assistant", "content": content}},
            "stopReason": self.stop_reason,
            **self.fields,
            "usage": self.usage,
            "metrics": {"latencyMs": 7},
        }
