"""The port that every backend implements; the rest of the gateway uses backends only through it."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol, TypeGuard, runtime_checkable

import msgspec
from msgspec import Struct

from adapters.values import Adapter
from admission.values import BackendLoad
from budgeting.token_ids import TokenIds
from budgeting.values import Message, Tool, ToolChoice
from gateway.contracts.audio import EventSink, Recording, Transcript
from gateway.contracts.embeddings import Conversation, EmbeddingsAnswer, EmbeddingsRequest
from gateway.contracts.events import Delta
from gateway.contracts.features import Feature
from gateway.contracts.images import ImageData
from gateway.contracts.rerank import ScoreAnswer, ScoreRequest
from gateway.contracts.values import PLAIN_TEXT, Caller, FinishReason, ResponseFormat, Sampling, Usage
from observability.trace_steps import TraceStep
from resilience.failures import invalid_input
from resilience.retry_budget import CallBudget


class BackendState(StrEnum):
    """State of a backend."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    STOPPED = "stopped"


READY: Final = BackendState.READY  # as a constant, as in ``gateway.contracts.values``


class Continue(StrEnum):
    """How a backend can resume an answer that another call began."""

    TOKENS = "tokens"  # exactly: from the prompt's ids and the generated ones
    TEXT = "text"  # from an assistant message that it completes (prefill)
    SHAPED = "shaped"  # with one of these: also an answer whose shape is constrained
    EVENTS = "events"  # with TOKENS: also an answer with reasoning or tool calls
    CHATS = "chats"  # with TOKENS: a chat with tools, images or template variables, from its text


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """The delivered part of a broken answer; ``token_ids``, where known, decode to exactly ``text``.

    ``tokens`` is the number that the backends which generated it counted; 0: not known.
    With ``generated`` the answer has reasoning or tool calls, and ``token_ids`` are all that was generated,
    which as text is ``generated``. The backend delivers the events of the whole answer again; those of
    ``token_ids`` carry no tokens.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    generated: str | None = None
    tokens: int = 0

    @property
    def replay(self) -> bool:
        """Whether the events of the whole answer are delivered again."""
        return self.generated is not None


class Work(Struct, frozen=True):
    """A request to a backend.

    ``sampling.max_tokens`` is always set; ``open_ended``: it is only the room left in the context. A backend
    uses ``token_ids``, without tokenizing again, or ``messages``. Prompts with different ``cache_salt``,
    by default the tenant, must not share cached prefixes: the time of a first token would reveal others'
    prompts. ``tenant``, ``org``, ``user``, ``session_id`` and ``deadline`` (on the injected clock) are sent
    to another Sluice; an operator's headers may hold them and ``request_id``, the caller's label. The first
    ``prefix_tokens`` of ``token_ids`` are the canonical stable prefix. When ``stream`` is false a backend may
    give larger pieces after the first.

    With ``partial`` the backend resumes that answer in one of the ways of its ``continues``: its first
    piece follows right after ``partial.text``, ``sampling.max_tokens`` bounds the rest, and stop strings,
    penalties and formats apply to the whole answer as far as the backend can.

    ``images`` are the image bytes by their hash, by which the messages name them; they take about
    ``image_tokens`` in addition to ``token_ids``.

    ``calls`` traces the backend's calls to its servers.

    The caller has taken one call from ``call_budget``; a backend takes another for each further server.
    """

    generation_id: str
    token_ids: TokenIds
    messages: tuple[Message, ...]
    sampling: Sampling
    response_format: ResponseFormat = PLAIN_TEXT
    adapter: Adapter | None = None
    priority: int = 0
    cache_salt: str | None = None
    tenant: str | None = None
    org: str | None = None
    user: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    deadline: float | None = None
    prefix_tokens: int = 0
    stream: bool = True
    partial: PartialAnswer | None = None
    open_ended: bool = False
    extra: Mapping[str, Any] = {}
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    call_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = {}
    images: Mapping[str, ImageData] = {}
    image_tokens: int = 0
    calls: TraceStep | None = None
    call_budget: CallBudget = msgspec.field(default_factory=CallBudget)

    @property
    def input_tokens(self) -> int:
        """The prompt's length, where the server does not report it."""
        return len(self.token_ids) + self.image_tokens

    @property
    def partial_ids(self) -> tuple[int, ...]:
        """The token ids of the partial answer; empty without one, or where they are not known."""
        return () if self.partial is None else self.partial.token_ids or ()


class Completion(Struct, frozen=True):
    """How a generation ended. ``queue_wait_s`` is the time before the first step.

    ``finish_reason`` is of the first text, ``others`` of the further ones; ``usage`` counts the prompt once
    and the tokens of all texts. ``stop_sequence`` is the stop string that ended the first text, where the
    backend reports it. For a resumed answer ``usage`` counts the request's own prompt and this call's tokens.
    ``warnings`` tell the caller what the backend could not do; ``context_full``: it reports a full context.
    """

    finish_reason: FinishReason
    usage: Usage
    queue_wait_s: float = 0.0
    others: tuple[FinishReason, ...] = ()
    warnings: tuple[str, ...] = ()
    stop_sequence: str | None = None
    context_full: bool = False


DeltaSink = Callable[[Delta], Awaitable[None]]


class Backend(Protocol):
    """A place where text is generated.

    Invariants:

    * ``generate`` either returns a :class:`Completion`, or raises ``resilience.failures.BackendFailure``,
      or is cancelled; nothing else leaves it.
    * When it ends, in whatever way, the backend holds no sequence, block, connection or task of this call.
    * Deltas come in order; their texts joined by index are the answers, their tokens summed are
      ``usage.output_tokens``, or more where they were estimated; none comes after ``generate`` has ended.
    * ``load`` never blocks and never fails: it is the last reported load, or ``None``.
    """

    @property
    def name(self) -> str:
        """The backend's name in the configuration."""

    @property
    def kind(self) -> str:
        """The kind that answers show: ``embedded``, ``vllm``, ``openai``, ``bedrock``."""

    @property
    def model(self) -> str:
        """The base model's id."""

    @property
    def features(self) -> frozenset[Feature]:
        """The features it supports."""

    @property
    def continues(self) -> frozenset[Continue]:
        """How it can resume a broken answer; empty when it cannot."""

    @property
    def state(self) -> BackendState:
        """Its current state."""

    @property
    def load(self) -> BackendLoad | None:
        """Its load as last reported."""

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Generate, pushing each piece to ``out``."""


class DelegatingBackend(ABC):
    """A backend that wraps another one; its properties are those of ``delegate``, which may change."""

    @property
    @abstractmethod
    def delegate(self) -> Backend:
        """The other backend."""

    @property
    def name(self) -> str:
        return self.delegate.name

    @property
    def kind(self) -> str:
        return self.delegate.kind

    @property
    def model(self) -> str:
        return self.delegate.model

    @property
    def features(self) -> frozenset[Feature]:
        return self.delegate.features

    @property
    def continues(self) -> frozenset[Continue]:
        return self.delegate.continues

    @property
    def state(self) -> BackendState:
        return self.delegate.state

    @property
    def load(self) -> BackendLoad | None:
        return self.delegate.load

    @property
    def generates(self) -> bool:
        return generates(self.delegate)

    async def embed(self, part: EmbeddingsRequest) -> EmbeddingsAnswer:
        """Only where :func:`makes_vectors` is true."""
        assert makes_vectors(self.delegate)
        return await self.delegate.embed(part)

    async def score(self, part: ScoreRequest) -> ScoreAnswer:
        """Only where :func:`scores_texts` is true."""
        assert scores_texts(self.delegate)
        return await self.delegate.score(part)

    async def transcribe(
        self, recording: Recording, caller: Caller, out: EventSink, trace_headers: bytes = b""
    ) -> Transcript:
        """Only where :func:`transcribes` is true."""
        assert transcribes(self.delegate)
        return await self.delegate.transcribe(recording, caller, out, trace_headers)


def generates(backend: Backend) -> bool:
    """Whether a backend generates text; ``generates`` is false on one that is known to do only other work."""
    return getattr(backend, "generates", True)


def knows_model(backend: Backend) -> bool:
    """Whether a backend's model is known; workers without a configured one must list it first."""
    return getattr(_innermost(backend), "known", True)


def pauses(backend: Backend) -> bool:
    """Whether every worker that a backend could ask has asked for a pause."""
    return getattr(_innermost(backend), "pauses", False)


def makes_vectors(backend: Backend) -> TypeGuard["Embeds"]:
    """Whether a backend makes vectors; one that delegates does if its delegate does."""
    return hasattr(_innermost(backend), "embed")  # a protocol's ``isinstance`` takes 20 µs


def scores_texts(backend: Backend) -> TypeGuard["Ranks"]:
    """Whether a backend, or its delegate, scores texts."""
    return hasattr(_innermost(backend), "score")


def transcribes(backend: Backend) -> TypeGuard["Transcribes"]:
    """Whether a backend, or its delegate, turns speech into text."""
    return hasattr(_innermost(backend), "transcribe")


def _innermost(backend: Backend) -> Backend:
    while isinstance(backend, DelegatingBackend):
        backend = backend.delegate
    return backend


class Absence(Struct, frozen=True):
    """Why a backend takes no work now, as a sentence for callers; ``loading``: it is about to take work.

    ``retry_s``: seconds until callers should try again, instead of the estimate of the backend's return.
    """

    reason: str
    loading: bool = False
    retry_s: float | None = None


@runtime_checkable
class Restarting(Protocol):
    """Extends :class:`Backend` for an engine that is restarted after it died."""

    @property
    def ready_in_s(self) -> float | None:
        """Estimate of seconds until it accepts work again; ``None`` when it is not restarting."""

    @property
    def absence(self) -> Absence:
        """Why it accepts no work, at a time when it does not."""

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until it accepts work, not if it never will; returns whether it does."""


def restarting(backend: Backend) -> Restarting | None:
    """A backend, or its delegate, as one that restarts; ``None``: neither does."""
    while not isinstance(backend, Restarting):
        if not isinstance(backend, DelegatingBackend):
            return None
        backend = backend.delegate
    return backend


def plain_inputs(part: EmbeddingsRequest) -> Sequence[str | tuple[int, ...]]:
    """The texts and token ids. Raises BackendFailure: an input is a conversation."""
    plain = [one for one in part.inputs if not isinstance(one, Conversation)]
    if len(plain) < len(part.inputs):
        raise invalid_input(
            "messages is a conversation; this model's backend takes texts and token ids, as input",
            "messages",
        )
    return plain


class Embeds(Backend, Protocol):
    """A backend that makes vectors."""

    async def embed(self, part: EmbeddingsRequest) -> EmbeddingsAnswer:
        """The vectors, as base64 of little-endian 32-bit floats; cancelling frees what the call holds.

        Raises BackendFailure; RateLimited: too many texts of the tenant wait.
        """


class Ranks(Backend, Protocol):
    """A backend that scores pairs of texts."""

    async def score(self, part: ScoreRequest) -> ScoreAnswer:
        """The scores; cancelling frees what the call holds. Raises BackendFailure, RateLimited."""


class Transcribes(Backend, Protocol):
    """A backend that turns speech into text."""

    async def transcribe(
        self, recording: Recording, caller: Caller, out: EventSink, trace_headers: bytes = b""
    ) -> Transcript:
        """The text; if streamed its events are pushed to ``out``. ``input_tokens`` are the worker's count, or
        ``TOKENS_PER_AUDIO_S`` per second if it reports only the length. Cancelling frees what the call holds.

        Raises BackendFailure, RateLimited; a failure after the first event is final.
        """


@dataclass(frozen=True, slots=True)
class Fleet:
    """All backends by name.

    A pool whose workers serve several models has a backend for each, named ``pool/model``, as long as they
    serve it. The others are fixed while the gateway runs.

    ``aliases`` are further names of base models, with the model's id.
    """

    backends: Mapping[str, Backend]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_models(self) -> Collection[str]:
        return {backend.model for backend in self.backends.values()}

    def load(self, name: str) -> BackendLoad | None:
        """A backend's load as last reported; ``None`` also for a model that its pool no longer serves."""
        backend = self.backends.get(name)
        return None if backend is None else backend.load


def configured_name(backend: str) -> str:
    """A backend's name in the configuration; for a model of a pool the pool's name."""
    return backend.partition("/")[0]
