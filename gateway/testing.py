"""Fakes of :mod:`gateway.ports`, and a server that runs on them; for tests and benchmarks."""

import asyncio
import itertools
import struct
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import uvicorn
from msgspec import structs

from budgeting.template import GENERATES
from budgeting.values import NO_KWARGS, Message, Plan, Tool
from gateway.app import create_app
from gateway.config.settings import ServerConfig
from gateway.contracts.answer import Answer, BudgetReport, Timings
from gateway.contracts.audio import AudioRequest, EventSink, Transcript
from gateway.contracts.embeddings import Conversation, EmbeddingsAnswer, EmbeddingsRequest, PooledRequest
from gateway.contracts.events import Delta
from gateway.contracts.model_card import ModelCard
from gateway.contracts.rerank import ScoreAnswer, ScoreRequest
from gateway.contracts.values import Caller, CallerRole, FinishReason, GenerateRequest, Usage
from gateway.errors import InvalidKey, MissingKey, PublicError
from gateway.generation.sink import Accept, Sink, nothing
from gateway.http.protocol import GatewayProtocol
from gateway.http.socket_protocol import SocketProtocol
from gateway.http.surfaces import Shown, everything
from gateway.keys.rate_limits import KeyLimiter
from gateway.keys.sessions import ConsoleSessions
from gateway.ports import Services
from gateway.prompts.text import ModelText
from gateway.prompts.text_threads import TextThreads
from gateway.requests.body_memory import BODIES, RECORDINGS, UPLOADS, BodyMemory
from gateway.state.idempotency import Claim, StoredReply

CALLER_KEY = "sk-caller"
OTHER_KEY = "sk-other"
ADMIN_KEY = "sk-admin"
OPERATOR_KEY = "sk-operator"


def answer_for(request: GenerateRequest, text: str, **changes: Any) -> Answer:
    """A whole answer to ``request``, with figures that a test can recognize."""
    answer = Answer(
        request_id=request.request_id,
        generation_id=request.generation_id,
        backend="embedded",
        backend_name="local",
        backend_version="demo+none",
        model="demo",
        trace_id=request.trace_id or "0" * 32,
        output_text=text,
        finish_reason=FinishReason.STOP,
        usage=Usage(input_tokens=842, output_tokens=137, cached_tokens=640),
        timings=Timings(queue_wait_ms=3.1, ttft_ms=88.0, total_ms=912.4),
        budget=BudgetReport(
            system=212,
            retrieval=380,
            recent_turns=250,
            older_summary=0,
            generation_reserve=696,
            dropped_chunks=(),
            dropped_turns=0,
        ),
        created=request.created,
    )
    return structs.replace(answer, **changes)


@dataclass
class FakeJourney:
    """Pushes ``pieces``, then finishes or fails with ``error``; counts its requests by their outcome.

    A request is accepted unless it fails before the first piece. ``plan`` is passed to the sink first. With
    ``holds`` it waits for ``resume`` before the end; ``changes`` replace fields of the answer; ``defect`` is
    raised instead of an end; with ``silent`` it returns without an end; with ``endless`` it pushes until it
    is cancelled.
    """

    pieces: Sequence[str] = ("Hello", ", ", "world")
    error: PublicError | None = None
    plan: Plan | None = None
    holds: bool = False
    endless: bool = False
    defect: Exception | None = None
    silent: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    requests: list[GenerateRequest] = field(default_factory=list)
    running: int = 0
    finished: int = 0
    cancelled: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def arrived(self, count: int) -> bool:
        return len(self.requests) >= count

    def resume(self) -> None:
        """Let requests that wait because of ``holds`` end."""
        self._resumed.set()

    async def run(self, request: GenerateRequest, sink: Sink, accept: Accept = nothing) -> None:
        self.requests.append(request)
        self.running += 1
        self.started.set()
        if self.pieces or self.error is None:
            accept()
        try:
            await self._run(request, sink)
            self.finished += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _run(self, request: GenerateRequest, sink: Sink) -> None:
        if self.plan is not None:
            sink.planned(self.plan, self.changes.get("model", "demo"))
        for piece in self.pieces:
            await sink.delta(Delta(piece, 1))
            await asyncio.sleep(0)
        while self.endless:
            await sink.delta(Delta("x" * 1000, 1))
            await asyncio.sleep(0)
        if self.holds:
            await self._resumed.wait()
        if self.defect is not None:
            raise self.defect
        if self.error is not None:
            await sink.fail(request.in_body_terms(self.error))
        elif not self.silent:
            await sink.finish(answer_for(request, "".join(self.pieces), **self.changes))


class FakeKeys:
    """Four keys: of two callers of different tenants, an admin and an operator."""

    def __init__(self) -> None:
        self._callers = {
            CALLER_KEY: Caller("acme", CallerRole.CALLER, "key_1", max_priority=0),
            OTHER_KEY: Caller("umbra", CallerRole.CALLER, "key_2"),
            ADMIN_KEY: Caller("ops", CallerRole.ADMIN, "key_3"),
            OPERATOR_KEY: Caller("ops", CallerRole.OPERATOR, "key_4"),
        }

    def authenticate(self, bearer: str | None) -> Caller:
        if bearer is None:
            raise MissingKey("no key was sent; allowed: Authorization: Bearer KEY")
        caller = self._callers.get(bearer)
        if caller is None:
            raise InvalidKey("the key is not known")
        return caller

    def by_id(self, key_id: str) -> Caller:
        for caller in self._callers.values():
            if caller.key_id == key_id:
                return caller
        raise InvalidKey("the key was revoked")


class FakeEmbeddings:
    """The vector of an input is its length; ``asked`` has the requests that ran."""

    def __init__(self) -> None:
        self.asked: list[PooledRequest] = []
        self.usable = True

    def may_ask(self, request: PooledRequest) -> bool:
        return self.usable

    async def run(self, request: EmbeddingsRequest) -> EmbeddingsAnswer:
        """Make vectors, whatever the model."""
        self.asked.append(request)
        inputs = [one.messages if isinstance(one, Conversation) else one for one in request.inputs]
        vectors = [b64encode(struct.pack("<f", len(one))).decode() for one in inputs]
        return EmbeddingsAnswer(request.model, vectors, len(vectors))

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        """The score of a pair is the length of its second text."""
        self.asked.append(request)
        scores = [float(len(text)) for _, text in request.pairs]
        return ScoreAnswer(request.model, scores, len(scores))

    async def transcribe(self, request: AudioRequest, out: EventSink) -> Transcript:
        """The text is the file's bytes."""
        self.asked.append(request)
        request.recording.file.seek(0)
        text = request.recording.file.read().decode(errors="replace")
        if not request.recording.stream:
            segments = [{"start": 0.0, "end": 61.5, "text": text}]
            return Transcript(request.model, [{"text": text, "segments": segments}], 1)
        await out(b'{"choices": [{"delta": {"content": "%b"}}]}' % text.encode())
        return Transcript(request.model, [None], 1)


class FakeTokenizer:
    """A tokenizer with one token per byte."""

    encoder = "bytes"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token 1 as the beginning, unless not wanted, and a token for each byte."""
        return ((1,) if add_special_tokens else ()) + tuple(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode bytes. Raises ValueError for an id that is not a byte."""
        return bytes(token_ids).decode(errors="replace")

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{one}>" for one in token_ids]


class FakeText(ModelText):
    """The text of a model with :class:`FakeTokenizer`."""

    def __init__(self) -> None:
        self.tokenizer: Any = FakeTokenizer()
        self.max_model_len = 4096
        self.blocks = False

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: tuple[Tool, ...] = (),
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> tuple[int, ...]:
        """Encode ``role:content`` lines, and ``assistant:`` as the prompt for an answer."""
        text = "".join(f"{one.role.value}:{one.content}\n" for one in messages)
        return tuple((text + ("assistant:" if kwargs.get(GENERATES) is not False else "")).encode())


class Unused:
    """A service that a test does not use; any use fails."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a service that the test did not give")


class FakeHealth:
    """Healthy and ready unless set otherwise."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.is_ready = is_ready

    def ping(self) -> Mapping[str, object]:
        return {"status": "healthy", "uptime_seconds": 1.5}

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        return self.is_ready, {"ready": self.is_ready, "status": "ready", "checks": {"model_loaded": True}}

    async def deep(self) -> tuple[bool, Mapping[str, object]]:
        return self.is_ready, {"status": "healthy", "running": 0}


@dataclass
class MemoryIdempotency:
    """Stores replies in a dict; fails if ``broken_get`` or ``broken_put`` is set."""

    kept: dict[tuple[str, str], tuple[str, StoredReply]] = field(default_factory=dict)
    broken_get: bool = False
    broken_put: bool = False

    async def get(
        self, tenant: str, key: str, claim: Claim, *, reads_only: bool = False
    ) -> tuple[str, StoredReply | None] | None:
        await asyncio.sleep(0)
        if self.broken_get:
            raise OSError("the disk is gone")
        return self.kept.get((tenant, key))

    async def renew(self, tenant: str, key: str, claim: Claim) -> None:
        """Claims are not stored."""

    async def release(self, tenant: str, key: str, claim: Claim) -> None:
        """Claims are not stored."""

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> bool:
        await asyncio.sleep(0)
        if self.broken_put:
            raise OSError("the disk is full")
        self.kept[tenant, key] = (fingerprint, reply)
        return True

    async def close(self) -> None:
        """Nothing to close."""


def fake_services(journey: FakeJourney | None = None, **changes: Any) -> Services:
    """Services made of fakes; ``changes`` replace single ones."""
    numbers = itertools.count(1)
    unused: Any = Unused()
    services = Services(
        journey=journey or FakeJourney(),
        may_use=lambda request: True,
        embeddings=FakeEmbeddings(),
        keys=FakeKeys(),
        limiter=KeyLimiter(),
        health=FakeHealth(),
        idempotency=MemoryIdempotency(),
        text=lambda model: FakeText(),
        text_threads=TextThreads(),
        models=lambda caller: (
            ModelCard("demo", "models/demo", max_model_len=4096),
            ModelCard("org/adapter-v1", "adapters/v1", parent="demo"),
        ),
        metrics=lambda: b"# HELP sluice_up 1\nsluice_up 1\n",
        limits=ServerConfig(),
        bodies=BodyMemory(BODIES * ServerConfig().max_body_bytes),
        recordings=BodyMemory(RECORDINGS * ServerConfig().max_audio_bytes),
        uploads=BodyMemory(UPLOADS * (200 << 20)),
        clock=time.monotonic,
        unix_time=lambda: 1_800_000_000.0,
        new_id=lambda kind: f"{kind}_{next(numbers)}",
        version="0.0.0",
        emit_edge=lambda outcome: None,
        open_metrics=True,
        adapters=unused,
        admission=unused,
        canary=unused,
        chaos=None,
        drain=unused,
        evaluations=unused,
        key_admin=unused,
        console=unused,
        sessions=ConsoleSessions(b"", FakeKeys().by_id, lambda: 1_800_000_000.0),
        prompts=unused,
        routing=unused,
        shadow=unused,
        usage=unused,
    )
    return replace(services, **changes)


@contextmanager
def serving(
    services: Services,
    *,
    http: type[asyncio.Protocol] | Literal["httptools"] = GatewayProtocol,
    shown: Shown = everything,
) -> Iterator[str]:
    """Run a real server on a free local port, in a thread, and yield its base URL."""
    config = uvicorn.Config(
        create_app(services, shown=shown),
        host="127.0.0.1",
        port=0,
        http=http,
        ws=SocketProtocol,
        log_level="warning",
        server_header=False,
        ws_max_size=32 * 1024 * 1024,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
