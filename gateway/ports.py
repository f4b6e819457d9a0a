"""What the HTTP edge and the journey need of the rest of the house, as Protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from accounting.keys import KeyLimits
from gateway.admin.ports import (
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
from gateway.contracts.edge_outcome import EdgeOutcome
from gateway.contracts.model_card import ModelCard
from gateway.contracts.values import Caller, GenerateRequest
from gateway.generation.sink import Sink
from gateway.prompts.text_port import TextService
from gateway.state.idempotency_values import IdempotencyStore


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


class HealthService(Protocol):
    """The three tiers of health; each returns the body to send."""

    def ping(self) -> Mapping[str, object]:
        """Liveness; touches nothing."""

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Readiness and its checks."""

    async def deep(self) -> tuple[bool, Mapping[str, object]]:
        """A tiny real generation, and the engine's figures."""


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
    """All that the HTTP edge uses. ``open_metrics``: they ask for no key."""

    journey: JourneyRunner
    keys: KeyAuthority
    limiter: RequestLimiter
    health: HealthService
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
