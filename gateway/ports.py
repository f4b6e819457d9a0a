"""What the HTTP edge and the journey need of the rest of the house, as Protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from accounting.keys import KeyLimits
from accounting.reports import Page, Report, Span
from budgeting.values import Message, Plan
from gateway.backends.port import Delta
from gateway.config_chaos import FaultRule
from gateway.contracts.values import Answer, Caller, CallerRole, GenerateRequest
from gateway.errors import PublicError
from gateway.routing.canary import MIN_SAMPLES, STEP_S, STEPS, WINDOW_S


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
class Promotion:
    """How an adapter's version is promoted.

    Args:
        alias: the name that leads to it; ``None``: it is served under its own.
        percent: of the alias' sessions; below 100 it is a canary.
        force: without a passing evaluation.
        comment: why, for the audit.
        dry_run: nothing is changed; the answer is as it would be.
    """

    alias: str | None = None
    percent: float = 100.0
    force: bool = False
    comment: str = ""
    dry_run: bool = False


class AdapterService(Protocol):
    """The adapters' registry for operators; ``who`` is the key's id.

    Changes are in force in this process when a call returns, in every other within a second. They raise
    what ``gateway.errors`` knows: NoSuchAdapter, AdapterRejected, AdapterNotHere, CatalogueError,
    NotEvaluatedError, BackendUnavailable (the state store is away) and BackendFailure (the engine).
    """

    def show_all(self) -> Mapping[str, object]:
        """Every version and alias, and what is loaded here."""

    def show(self, adapter_id: str) -> Mapping[str, object]:
        """One version or alias."""

    async def add(
        self,
        adapter_id: str,
        location: str,
        *,
        who: str,
        sha256: str | None = None,
        labels: Mapping[str, str] | None = None,
        base_revision: str | None = None,
        comment: str = "",
        dry_run: bool = False,
    ) -> Mapping[str, object]:
        """Bring, check and register a version, staged; of a dry run only check."""

    async def verify(self, adapter_id: str, *, who: str) -> Mapping[str, object]:
        """Check a version's copy on this machine anew."""

    async def preload(self, adapter_id: str, *, who: str) -> Mapping[str, object]:
        """Load a version now, in every process."""

    async def promote(self, adapter_id: str, promotion: Promotion, *, who: str) -> Mapping[str, object]:
        """Lead an alias to a version, or make it active."""

    async def retire(
        self, adapter_id: str, *, who: str, comment: str = "", dry_run: bool = False
    ) -> Mapping[str, object]:
        """Serve a version no more."""

    async def pin(self, adapter_id: str, pinned: bool, *, who: str) -> Mapping[str, object]:
        """Keep a version loaded in every process, or no longer."""

    async def label(self, adapter_id: str, labels: Mapping[str, str], *, who: str) -> Mapping[str, object]:
        """Give a version other labels."""

    async def evaluated(
        self, adapter_id: str, report: Mapping[str, object], *, who: str
    ) -> Mapping[str, object]:
        """Keep an evaluation's report with a version."""

    async def roll_back(
        self, alias: str, *, who: str, to: str | None = None, comment: str = "", dry_run: bool = False
    ) -> Mapping[str, object]:
        """Lead an alias back."""

    async def end_canary(
        self, alias: str, *, who: str, comment: str = "", dry_run: bool = False
    ) -> Mapping[str, object]:
        """Take an alias' canary away."""


@dataclass(frozen=True, slots=True)
class RoutingOrder:
    """Who changes the routing, and how.

    Args:
        who: the key's id.
        comment: why, for history and audit.
        expected: the revision that the operator has seen last; ``None``: whatever it is.
        dry_run: validate and show what would change; change nothing.
    """

    who: str
    comment: str = ""
    expected: int | None = None
    dry_run: bool = False


class RoutingService(Protocol):
    """The routing's revisions for operators.

    A change is in force in this process when its call returns, in every other within a second. Changes raise
    InvalidRequest (every fault with its path), UnknownRoute, RevisionConflict (another one came first) and
    BackendUnavailable (the state store is away); reads raise the last too.
    """

    def show(self) -> Mapping[str, object]:
        """The revision in force in this process, and whether the store has one that it cannot use."""

    async def apply(self, config: Mapping[str, object], order: RoutingOrder) -> Mapping[str, object]:
        """Make a whole configuration the next revision."""

    async def set_weight(
        self, route: str, backend: str, percent: float, order: RoutingOrder
    ) -> Mapping[str, object]:
        """Give a backend its share of a route; the others share the rest in proportion."""

    async def promote(self, route: str, backend: str, order: RoutingOrder) -> Mapping[str, object]:
        """Give a backend the whole route."""

    async def roll_back(self, to: int | None, order: RoutingOrder) -> Mapping[str, object]:
        """Make an earlier configuration the next revision; ``None``: the last other one."""

    async def history(self, limit: int) -> Sequence[Mapping[str, object]]:
        """The last revisions, newest first."""

    async def diff(self, a: int, b: int) -> Sequence[Mapping[str, object]]:
        """What differs from revision ``a`` to ``b``."""

    async def audit(self, limit: int) -> Sequence[Mapping[str, object]]:
        """What operators did last, newest first."""


@dataclass(frozen=True, slots=True)
class CanaryOrder:
    """What a canary shall be; ``gateway.routing.canary.Plan`` tells of the fields."""

    who: str
    route: str
    backend: str
    comment: str = ""
    steps: tuple[float, ...] = STEPS
    min_samples: int = MIN_SAMPLES
    step_s: float = STEP_S
    window_s: float = WINDOW_S
    dry_run: bool = False


class CanaryService(Protocol):
    """The canary for operators; there is one at a time.

    Orders raise InvalidRequest, UnknownRoute, RevisionConflict (it is not in a phase for that, or somebody
    was quicker) and BackendUnavailable (the state store is away).
    """

    def show(self) -> Mapping[str, object]:
        """The last canary, as this process knows it."""

    async def start(self, order: CanaryOrder) -> Mapping[str, object]:
        """Give a backend the first step of a route, and more as it proves itself.

        A dry run validates, tells the changes of the first step, and makes none.
        """

    async def pause(self, who: str, comment: str) -> Mapping[str, object]:
        """Keep its share, judge nothing."""

    async def resume(self, who: str, comment: str) -> Mapping[str, object]:
        """Judge again."""

    async def abort(self, who: str, comment: str, *, dry_run: bool = False) -> Mapping[str, object]:
        """End it, with the route's weights as before. A dry run tells the changes and makes none."""


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """A key to be made; ``None`` is no limit, ``expires_at`` is Unix seconds."""

    tenant: str
    role: CallerRole = CallerRole.CALLER
    max_priority: int = 0
    routes: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    expires_at: float | None = None
    comment: str = ""
    org: str | None = None


class KeyService(Protocol):
    """The keys for admins; ``who`` is the key's id.

    Changes are in force in this process when a call returns, in every other within a second. They raise
    InvalidRequest, Forbidden (too many keys), NoSuchKey and BackendUnavailable (the state store is away).
    """

    def show_all(self) -> Mapping[str, object]:
        """The keys that are not revoked; no secret."""

    async def create(self, order: KeyOrder, *, who: str) -> Mapping[str, object]:
        """Make a key; the answer alone tells its secret."""

    async def revoke(self, key_id: str, *, who: str) -> None:
        """Refuse a key from now on."""


class ShadowService(Protocol):
    """How shadowed requests compare, for operators; raises BackendUnavailable when the ledger is away."""

    async def report(
        self, *, limit: int, route: str | None = None, since: float | None = None
    ) -> Mapping[str, object]:
        """The newest ``limit`` pairs, compared, of one route or all, since a Unix time."""


class UsageService(Protocol):
    """The ledger for operators; raises BackendUnavailable when its database cannot be read."""

    async def report(self, report: Report) -> Mapping[str, object]:
        """Sums. Raises InvalidRequest: too many lines."""

    async def rows(self, page: Page) -> Mapping[str, object]:
        """A page of rows."""

    async def reconcile(self, span: Span) -> Mapping[str, object]:
        """The ledger beside the engines' own counters."""


class ChaosService(Protocol):
    """The faults made on purpose, for operators' eyes and hands."""

    def show(self) -> Mapping[str, object]:
        """The rules in force and what they did, as JSON values."""

    async def replace(self, rules: Sequence[FaultRule], *, who: str) -> Mapping[str, object]:
        """Put other rules in force; these. Raises InvalidRequest for a backend that is not there."""


class DrainService(Protocol):
    """Taking this process out of service."""

    async def begin(self, who: str) -> Mapping[str, object]:
        """Begin, unless it has begun. ``in_flight``: how many are inside; ``closed``: nobody new is taken."""


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
