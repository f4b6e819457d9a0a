"""A worker on a raw socket that does exactly what a test tells it, down to the byte."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from budgeting.values import Message, Role
from gateway.backends.port import Work
from gateway.backends.workers.backend import WorkersBackend
from gateway.backends.workers.dialect import CompletionWriter, Dialect
from gateway.backends.workers.loras import WorkerLoras
from gateway.backends.workers.pool_model import ModelReading, ReadModel
from gateway.backends.workers.serving_pool import ServingPool
from gateway.backends.workers.tokenizer_check import SAMPLES, TokenizerCheck
from gateway.config.backends import OpenAIBackend
from gateway.contracts.features import Feature
from gateway.contracts.values import Sampling
from gateway.wiring.workers import make_workers
from observability.collectors import WorkerStatus
from resilience.turns import Turns

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"


@dataclass
class Request:
    """A request that arrived, and the streams of its connection."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def whole(self, status: int, body: bytes, *headers: str, kind: str = "application/json") -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(body)}", *headers]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Request], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    """A chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(body: object) -> bytes:
    """A server-sent event."""
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def piece(text: str, index: int = 0, **fields: object) -> bytes:
    """A chat chunk with text."""
    return event({"choices": [{"index": index, "delta": {"content": text}, "finish_reason": None, **fields}]})


def ending(reason: str = "stop", index: int = 0) -> bytes:
    """A chat chunk with a finish reason."""
    return event({"choices": [{"index": index, "delta": {}, "finish_reason": reason}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    """The chunk with the usage."""
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event({"choices": [], "usage": counts})


DONE = event(b"[DONE]")


def answers(*texts: str, delay_s: float = 0.0, prompt: int = 5, cached: int | None = None) -> Behaviour:
    """A behaviour that streams a good answer, one text per chunk."""

    async def behave(request: Request) -> None:
        await request.send(STREAM_HEAD)
        for text in texts:
            await asyncio.sleep(delay_s)
            await request.send(chunk(piece(text)))
        await request.send(chunk(ending() + usage(prompt, len(texts), cached) + DONE), END)

    return behave


def refuses(status: int, body: object = None, *headers: str) -> Behaviour:
    """A behaviour that answers with an error status."""

    async def behave(request: Request) -> None:
        await request.whole(status, json.dumps(body).encode(), *headers)

    return behave


def sends(*pieces: bytes, then: str = "close") -> Behaviour:
    """A behaviour that sends these bytes; then it closes, resets, or holds the connection open."""

    async def behave(request: Request) -> None:
        await request.send(*pieces)
        if then == "hold":
            await request.reader.read()
        elif then == "reset":
            request.reset()
        else:
            request.close()

    return behave


@dataclass
class RawWorker:
    """Answers each POST with the next of its behaviours; the last one is repeated."""

    behaviours: list[Behaviour]
    healthy: bool = True
    metrics: str = ""
    models: Callable[[], bytes] | None = None
    liveliness: bytes | None = None  # the answer of LiteLLM's path for probes
    tokenize: Callable[[str], list[int]] | None = None
    requests: list[Request] = field(default_factory=list)
    posts: frozenset[str] = frozenset()  # paths on which a GET gets 405
    keyed: frozenset[str] = frozenset()  # paths on which a GET gets 401
    statuses: dict[str, int] = field(default_factory=dict)  # of a GET, by its path
    prefix: str = ""  # the path that it is behind; all other paths of its address are a page
    tokenized: list[str | None] = field(default_factory=list)  # the models that tokenize requests name
    gone: int = 0
    probes: int = 0
    probe_delay_s: float = 0.0
    port: int = 0
    tls: ssl.SSLContext | None = None
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}{self.prefix}/v1"

    @property
    def connections(self) -> int:
        return len(self._writers)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Like a process that is killed: every connection is reset, new ones are refused."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        self._server = None
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone += 1
        finally:
            self._writers.discard(writer)
            writer.close()

    async def read_body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> Any:
        """Read the body and return its JSON; None if it is empty."""
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return json.loads(body) if body else None

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode().strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
        request = Request(method, path, headers, await self.read_body(reader, headers), writer, reader)
        if not path.startswith(self.prefix):
            await request.whole(200, b"<html>", kind="text/html")
            return True
        path = path.removeprefix(self.prefix)
        if method == "GET":
            self.probes += path == "/health"
            if path == "/health" and self.probe_delay_s:
                await asyncio.sleep(self.probe_delay_s)
            known = {"/health": b"", "/ready": b"", "/metrics": self.metrics.encode()}
            if self.models is not None:
                known["/v1/models"] = self.models()
            if self.liveliness is not None:
                known["/health/liveliness"] = self.liveliness
            missing = 405 if path in self.posts else 401 if path in self.keyed else 404
            status = (200 if self.healthy else 500) if path in known else missing
            status = self.statuses.get(path, status)
            await request.whole(status, known.get(path, b""), kind="text/plain")
            return True
        if path == "/tokenize":
            messages = request.body.get("messages", [{"content": request.body.get("prompt")}])
            text = "".join(one["content"] for one in messages)
            self.tokenized.append(request.body.get("model"))
            ids = None if self.tokenize is None else self.tokenize(text)
            await request.whole(404 if ids is None else 200, json.dumps({"tokens": ids}).encode())
            return True
        self.requests.append(request)
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        await behaviour(request)
        return not writer.is_closing()


# Short intervals; long timeouts, because a machine may stall for seconds. A test of a timeout sets its own.
QUICK: dict[str, Any] = {
    "connect_timeout_seconds": 30,
    "first_token_timeout_seconds": 30,
    "idle_timeout_seconds": 30,
    "total_timeout_seconds": 60,
    "probe_interval_seconds": 0.05,
    "probe_timeout_seconds": 30,
    "metrics_interval_seconds": 0.05,
    "eject_seconds": 0.1,
    "slow_start_seconds": 0,
}


@asynccontextmanager
async def pool(
    *workers: RawWorker, started: bool = True, ready: bool = True, **changes: Any
) -> AsyncIterator[WorkersBackend]:
    """Run a pool of these workers; with ``ready``, wait until all are in service. Nothing may leak."""
    for worker in workers:
        if started:
            await worker.start()
    serving = make_pool(*[worker.url for worker in workers], **changes)
    [backend] = serving.serving
    others = asyncio.all_tasks()
    try:
        async with asyncio.TaskGroup() as group:
            loops = group.create_task(serving.run())
            if started and ready:
                await until(lambda: all(one.state == "in_service" for one in state_of(backend)))
            yield backend
            assert [one.in_flight for one in state_of(backend)] == [0] * len(workers)
            await until(lambda: in_use(backend) == 0)
            loops.cancel()
        await until(lambda: sum(one.connections for one in state_of(backend)) == 0)
    finally:
        for worker in workers:
            await worker.die()
    await until(lambda: asyncio.all_tasks() <= others)


# The gateway's tokenizer makes each byte an id, and its template joins the contents of the messages.
SAMPLES_OF_BYTES = tuple(
    (messages, tuple("".join(one.content for one in messages).encode())) for messages in SAMPLES
)


def make(*urls: str, **changes: Any) -> WorkersBackend:
    """The only backend of a pool whose loops do not run."""
    [backend] = make_pool(*urls, **changes).serving
    return backend


def make_pool(
    *urls: str,
    environ: dict[str, str] | None = None,
    reasons: bool = False,
    read: ReadModel | None = None,
    incapable: Callable[[str], frozenset[Feature]] = lambda model: frozenset(),
    changed: Callable[[ServingPool, Set[str]], None] = lambda pool, gone: None,
    **changes: Any,
) -> ServingPool:
    section = OpenAIBackend.model_validate(
        {"kind": "openai", "base_urls": list(urls), "model": "base", **QUICK, **changes}
    )
    clock = asyncio.get_running_loop().time
    return make_workers(
        "worker",
        section,
        reading=ModelReading(token_bytes, TokenizerCheck(SAMPLES_OF_BYTES, reasons)),
        read=read,
        clock=clock,
        turns=Turns(),
        environ=environ or {},
        incapable=incapable,
        changed=changed,
    )


def token_bytes(token: int) -> bytes:
    """The bytes of a token: ids below 256 are bytes, others have none."""
    return bytes([token]) if token < 256 else b""


def state_of(backend: WorkersBackend) -> list[WorkerStatus]:
    """The state of the workers that serve the model."""
    now = asyncio.get_running_loop().time()
    return [worker.status(now) for worker in backend._workers.values()]


async def follow(backend: WorkersBackend) -> None:
    """Ask each worker for its list of models."""
    for worker in tuple(backend._workers.values()):
        await worker.follow()


def loras_of(backend: WorkersBackend) -> list[WorkerLoras]:
    """The adapters of the workers in service."""
    return [one.loras for one in backend._workers.values() if one.loras and one.health.in_service]


def in_use(backend: WorkersBackend) -> int:
    """The number of connections that serve a request or are being made."""
    clients = [worker.client for worker in backend._workers.values()]
    return sum(one._opening + sum(connection.busy for connection in one._open) for one in clients)


async def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Poll until ``holds()``. Raises AssertionError after ``timeout_s``."""
    for _ in range(int(timeout_s / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")


def work(text: str = "Hello", *, ids: Sequence[int] | None = None, **changes: Any) -> Work:
    """A request to a worker; ``changes`` replace its fields."""
    sampling = Sampling(**{"max_tokens": 16, **changes.pop("sampling", {})})
    made = {
        "generation_id": "gen_1",
        "token_ids": tuple(ids if ids is not None else text.encode()),
        "messages": (Message(Role.USER, text),),
        "sampling": sampling,
        "cache_salt": "acme",
    }
    return Work(**{**made, **changes})


def make_writer(
    model: str = "base", dialect: Dialect = Dialect.VLLM, token_ids: bool = False, **keys: Any
) -> CompletionWriter:
    """A writer for the section with these keys."""
    given = {"prompt": "messages", "dialect": dialect.value, **keys}
    section = OpenAIBackend(kind="openai", base_urls=["http://127.0.0.1:1/v1"], **given)
    return CompletionWriter(model, section, dialect, token_ids)
