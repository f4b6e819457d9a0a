"""What the HTTP edge and the journey need of the rest of the house, as Protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from accounting.keys import KeyLimits
from budgeting.values import Message, Plan
from gateway.backends.port import Delta
from gateway.contracts.values import Answer, Caller, GenerateRequest
from gateway.errors import PublicError
from gateway.ports_admin import (
    AdapterService,
    AdmissionService,
    CanaryService,
    ChaosService,
    DrainService,
    KeyService,
    PromptService,
    RoutingService,
    ShadowService,
    UsageService,
)


class Sink(Protocol):
    """Where an answer goes: JSON, server-sent events or a WebSocket, in one of the contracts.

    Invariants: any number of ``delta`` of a stream, none of another answer, then exactly one of ``finish``
    and ``fail``; none after a cancellation. Each awaits until the transport has taken the bytes, so that a
    slow reader slows its own request and nobody else's.
    """

    def planned(self, plan: Plan) -> None:
        """The prompt that is handed to a backend, before a ``delta`` of it; the last one told counts."""

    async def delta(self, delta: Delta) -> None:
        """A piece of the answer; its text may be empty."""

    async def finish(self, answer: Answer) -> None:
        """The answer is whole (``answer.output_text`` holds all of it)."""

    async def fail(self, error: PublicError, *, request_id: str, trace_id: str) -> None:
        """No (whole) answer; when deltas went out before, the answer stays partial."""


class JourneyRunner(Protocol):
    """Runs one request to its end; raises nothing but cancellation."""

    async def run(self, request: GenerateRequest, sink: Sink) -> None:
        """Every failure reaches ``sink.fail``; cancelling frees all the request holds."""


class KeyAuthority(Protocol):
    """Tells who a key belongs to."""

    def authenticate(self, bearer: str | None) -> Caller:
        """``bearer`` is the key as sent, without the scheme. Raises MissingKey or InvalidKey."""


class RequestLimiter(Protocol):
    """Keys' limits at the door."""

    async def enter(self, caller: Caller) -> None:
        """Count a request. Raises RateLimited."""

    async def headers(self, caller: Caller) -> Sequence[tuple[bytes, bytes]]:
        """What every answer to a limited key tells; nothing for others."""

    async def used(self, key_id: str, limits: KeyLimits) -> Mapping[str, int]:
        """What is used or held of a key's limits now, by their names."""


class TextService(Protocol):
    """The served model's tokenizer and chat template."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""

    async def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Token ids of the rendered chat template."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a plain text."""

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids; raises ValueError for an id outside the vocabulary."""

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own string for each id."""


class CardKind(StrEnum):
    """What a served model is."""

    BASE = "base"
    ADAPTER = "adapter"
    BACKEND = "backend"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of ``GET /v1/models``: a base model, an adapter or a backend alias."""

    id: str
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    kind: CardKind = CardKind.BASE


class Health(Protocol):
    """The three tiers of health (seed 000 §14); each returns the body to send."""

    def ping(self) -> Mapping[str, object]:
        """Liveness; touches nothing."""

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Readiness and its checks."""

    async def deep(self) -> tuple[bool, Mapping[str, object]]:
        """A tiny real generation, and the engine's figures."""


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A whole HTTP answer kept under an idempotency key."""

    status: int
    content_type: str
    body: bytes


class IdempotencyStore(Protocol):
    """Answers kept for 24 h under (tenant, key); bounded, oldest dropped first."""

    async def get(self, tenant: str, key: str) -> tuple[str, StoredReply] | None:
        """The body's fingerprint and the stored reply."""

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> None:
        """Keep a reply."""


@dataclass(frozen=True, slots=True)
class EdgeOutcome:
    """What became of a request that had no journey.

    Args:
        request_id, trace_id: as told to the caller.
        trace_parent, trace_state: the caller's trace context, if it sent a valid one.
        arrived_at: seconds on the injected clock.
        method: HTTP's, or ``WS``.
        path: the path as the gateway knows it, never as it was sent.
        contract: of paths that generate; ``None`` for all others.
        tenant: who asked, once that was known.
        status: what went out; ``None``: the caller left before.
        error_code: a stable code.
        replayed: whether it was a stored answer, given again.
    """

    request_id: str
    trace_id: str
    trace_parent: str | None
    trace_state: str | None
    arrived_at: float
    method: str
    path: str
    contract: str | None
    tenant: str | None
    status: int | None
    error_code: str | None
    replayed: bool = False


def _tell_nobody(outcome: EdgeOutcome) -> None:
    """For those who do not care."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of the HTTP edge."""

    max_body_bytes: int = 4_194_304
    max_messages: int = 2_048
    request_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Services:
    """All that the HTTP edge uses; built by ``gateway.wiring``. ``open_metrics``: they ask for no key."""

    journey: JourneyRunner
    keys: KeyAuthority
    limiter: RequestLimiter
    health: Health
    idempotency: IdempotencyStore
    text: Callable[[], TextService]
    prompts: PromptService
    admission: AdmissionService
    models: Callable[[Caller], Sequence[ModelCard]]
    metrics: Callable[[], bytes]
    limits: HttpLimits
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    new_id: Callable[[str], str]
    version: str
    tell_edge: Callable[[EdgeOutcome], None] = _tell_nobody
    open_metrics: bool = True
    chaos: ChaosService | None = None
    usage: UsageService | None = None
    adapters: AdapterService | None = None
    routing: RoutingService | None = None
    canary: CanaryService | None = None
    key_desk: KeyService | None = None
    shadow: ShadowService | None = None
    drain: DrainService | None = None
