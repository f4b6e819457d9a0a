"""The interfaces of the gateway's core that the HTTP edge uses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.admin.adapters import AdapterAdmin
from gateway.admin.admission import AdmissionAdmin
from gateway.admin.canary import CanaryAdmin
from gateway.admin.chaos import ChaosAdmin
from gateway.admin.console import ConsoleAdmin
from gateway.admin.drain import DrainAdmin
from gateway.admin.evaluations import EvaluationAdmin
from gateway.admin.keys import KeyAdmin
from gateway.admin.prompts import PromptAdmin
from gateway.admin.routing import RoutingAdmin
from gateway.admin.usage import ShadowAdmin, UsageAdmin
from gateway.batches.batches import Batches
from gateway.batches.files import Files
from gateway.config.settings import ServerConfig
from gateway.contracts.audio import AudioRequest, EventSink, Transcript
from gateway.contracts.embeddings import EmbeddingsAnswer, EmbeddingsRequest, PooledRequest
from gateway.contracts.model_card import ModelCard
from gateway.contracts.openai_answer import REASONING_FIELDS, ReasoningField
from gateway.contracts.origin import EdgeRequest
from gateway.contracts.rerank import ScoreAnswer, ScoreRequest
from gateway.contracts.responses.request import ReasoningSeal
from gateway.contracts.values import Caller, GenerateRequest
from gateway.generation.sink import Accept, Sink, nothing
from gateway.keys.failed_logins import FailedLogins
from gateway.keys.rate_limits import KeyLimiter
from gateway.keys.sessions import ConsoleSessions
from gateway.prompts.text import ModelText
from gateway.prompts.text_threads import TextThreads
from gateway.requests.background import BackgroundResponses
from gateway.requests.body_memory import BodyMemory
from gateway.requests.stored_responses import StoredResponses
from gateway.state.idempotency import IdempotencyStore
from resilience.time_limits import TimeLimits
from resilience.turns import Turns


class JourneyRunner(Protocol):
    """Runs one request to its end; raises nothing but cancellation."""

    async def run(self, request: GenerateRequest, sink: Sink, accept: Accept = nothing) -> None:
        """Run a request. Every failure reaches ``sink.fail``; cancellation releases all that it holds."""


class EmbeddingRunner(Protocol):
    """Makes vectors, scores and transcripts."""

    def may_ask(self, request: PooledRequest) -> bool:
        """Whether the key may now use the model that the request names, and a backend serves it."""

    async def run(self, request: EmbeddingsRequest) -> EmbeddingsAnswer:
        """The vectors. Raises errors that callers see."""

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        """The scores. Raises as :meth:`run`."""

    async def transcribe(self, request: AudioRequest, out: EventSink) -> Transcript:
        """The text of a recording; the data of a stream's events goes to ``out``. Raises as :meth:`run`."""


class KeyAuthority(Protocol):
    """Finds the caller that a key belongs to."""

    def authenticate(self, bearer: str | None) -> Caller:
        """The caller of ``bearer``, the sent key without its scheme. Raises MissingKey or InvalidKey."""

    def by_id(self, key_id: str) -> Caller:
        """The caller of the key with this id, with its current rights. Raises InvalidKey."""


class HealthService(Protocol):
    """The three tiers of health; each returns the body to send."""

    def ping(self) -> Mapping[str, object]:
        """Liveness; touches nothing."""

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Whether the gateway is ready, and the results of the checks."""

    async def deep(self) -> tuple[bool, Mapping[str, object]]:
        """Whether a tiny real generation succeeded, and the engine's metrics."""


@dataclass(frozen=True, slots=True)
class Services:
    """All that the HTTP edge uses.

    Args:
        may_use: whether the caller may now use the route, model and adapter of the request.
        emit_edge: is called with the outcome of each request that no journey reports.
        recordings: counts the bytes of the files of ``/v1/audio``, which are on disk.
        uploads: counts the bytes of the files of ``/v1/files`` until they are stored.
        open_metrics: whether ``/metrics`` needs no key.
        reasoning_fields: the fields that contain a chat's reasoning.
        chaos: ``None`` unless deliberate faults are enabled.
        seal: encrypts reasoning; ``None`` without a key for that.
    """

    journey: JourneyRunner
    embeddings: EmbeddingRunner
    may_use: Callable[[GenerateRequest], bool]
    keys: KeyAuthority
    limiter: KeyLimiter
    health: HealthService
    idempotency: IdempotencyStore
    text: Callable[[str], ModelText]
    text_threads: TextThreads
    models: Callable[[Caller], Sequence[ModelCard]]
    metrics: Callable[[], bytes]
    limits: ServerConfig
    bodies: BodyMemory
    recordings: BodyMemory
    uploads: BodyMemory
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    new_id: Callable[[str], str]
    version: str
    emit_edge: Callable[[EdgeRequest], None]
    open_metrics: bool
    adapters: AdapterAdmin
    admission: AdmissionAdmin
    canary: CanaryAdmin
    evaluations: EvaluationAdmin
    chaos: ChaosAdmin | None
    drain: DrainAdmin
    key_admin: KeyAdmin
    console: ConsoleAdmin
    sessions: ConsoleSessions
    prompts: PromptAdmin
    routing: RoutingAdmin
    shadow: ShadowAdmin
    usage: UsageAdmin
    reasoning_fields: Sequence[ReasoningField] = REASONING_FIELDS[:1]
    time_limits: TimeLimits = field(default_factory=TimeLimits)
    turns: Turns = field(default_factory=Turns)
    failed_logins: FailedLogins = field(default_factory=FailedLogins)
    responses: StoredResponses = field(default_factory=StoredResponses)
    seal: ReasoningSeal | None = None
    background: BackgroundResponses = field(default_factory=BackgroundResponses)
    files: Files = field(default_factory=Files)
    batches: Batches = field(default_factory=lambda: Batches(Files()))
