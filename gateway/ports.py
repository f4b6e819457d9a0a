"""What the HTTP edge and the journey need of the rest of the house, as Protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from budgeting.values import Message
from gateway.backends.port import Delta
from gateway.contracts.values import Answer, Caller, GenerateRequest
from gateway.errors import PublicError


class Sink(Protocol):
    """Where an answer goes: JSON, server-sent events or a WebSocket, in one of the contracts.

    Invariants: any number of ``delta``, then exactly one of ``finish`` and ``fail``; none after a
    cancellation. Each awaits until the transport has taken the bytes, so that a slow reader slows
    its own request and nobody else's.
    """

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


class PromptService(Protocol):
    """The registered prompt versions, and what would be sent for a request."""

    def versions(self) -> Sequence[Mapping[str, object]]:
        """One entry a version, sorted by id."""

    def version(self, version_id: str) -> Mapping[str, object]:
        """All of one version. Raises UnknownPromptVersion."""

    async def preview(self, request: GenerateRequest) -> Mapping[str, object]:
        """What would be sent, section by section; generates nothing and bills nothing.

        Raises the errors that the request itself would meet up to its budget.
        """


class AdmissionService(Protocol):
    """Admission for operators' eyes."""

    def show(self) -> Mapping[str, object]:
        """Queues, limits, forecasts and the last decisions, as JSON values."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of ``GET /v1/models``: a base model, an adapter or a backend alias."""

    id: str
    root: str
    parent: str | None = None
    max_model_len: int | None = None


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
class HttpLimits:
    """Bounds of the HTTP edge."""

    max_body_bytes: int = 4_194_304
    max_messages: int = 2_048
    request_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Services:
    """All that the HTTP edge uses; built by ``gateway.wiring``."""

    journey: JourneyRunner
    keys: KeyAuthority
    health: Health
    idempotency: IdempotencyStore
    text: Callable[[], TextService]
    prompts: PromptService
    admission: AdmissionService
    models: Callable[[], Sequence[ModelCard]]
    metrics: Callable[[], bytes]
    limits: HttpLimits
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    new_id: Callable[[str], str]
    version: str
