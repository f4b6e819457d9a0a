"""The values that travel through the journey; every public contract maps to them and from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from accounting.keys import NO_BUDGET, NO_LIMITS, Budget, KeyLimits, ModelLimits
from accounting.keys import CallerRole as CallerRole
from budgeting.values import EvidenceChunk, Message, Tool, ToolCall, ToolChoice, ToolChoiceMode
from gateway.contracts.features import Feature
from gateway.errors import PublicError

EMPTY: Mapping[str, object] = MappingProxyType({})
NO_BIAS: Mapping[int, float] = MappingProxyType({})
NO_NAMES: Mapping[str, str] = MappingProxyType({})


class Contract(StrEnum):
    """The public contract a request came in by."""

    NATIVE = "native"
    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ERROR = "error"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: derived from the key, never from the body.

    ``routes``, ``adapters`` and ``models`` are those that the key may use; ``None``: all. ``aliases`` are its
    own names of models. ``tools``: whether it may have tools. ``by_front``: ``tenant`` and
    ``org`` were named by another Sluice, which bills them. ``model_limits`` hold besides ``limits`` and
    ``budget``. Only requests of one ``cache_salt`` share cached
    prefixes; by default that is the tenant.
    """

    tenant: str
    role: CallerRole
    key_id: str
    max_priority: int = 1
    routes: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    limits: KeyLimits = NO_LIMITS
    org: str | None = None
    by_front: bool = False
    own_salt: str | None = None
    budget: Budget = NO_BUDGET
    tools: bool = True
    models: tuple[str, ...] | None = None
    aliases: tuple[tuple[str, str], ...] = ()
    model_limits: tuple[ModelLimits, ...] = ()
    cache_salt: str = field(init=False)  # whose cached prefixes its requests may use

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_salt", self.own_salt or self.tenant)

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


class Sampling(Struct, frozen=True):
    """Sampling as the caller asked; ``None`` and empty mean "the backend's default".

    Values are validated at the edge: finite numbers inside their documented ranges. ``echo``: a text begins
    with its prompt, and log-probabilities with those of the prompt's tokens; ``prompt_only``: it ends there.
    The other fields of vLLM's: ``ignore_eos``: the model's own end ends nothing; ``min_tokens``: nothing but
    a length ends a text earlier; ``stop_token_ids`` end it as the model's own end does.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = NO_BIAS
    logprobs: int | None = None
    echo: bool = False
    prompt_only: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


class FormatType(StrEnum):
    """Shape that the answer's text must have."""

    TEXT = "text"
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The asked shape; ``spec`` is the schema, pattern, choices or grammar as JSON text.

    ``param`` is the field of the body that asks for it, ``grammar_bytes`` the memory that its grammar takes.
    """

    type: FormatType = FormatType.TEXT
    spec: str = ""
    param: str = field(default="response_format", compare=False, repr=False)
    grammar_bytes: int = field(default=0, compare=False, repr=False)


PLAIN_TEXT = ResponseFormat()


def template_variables(effort: str | None, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A chat template's variables: those that vLLM sets for a ``reasoning_effort``, and the caller's."""
    thinking = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {**thinking, **given}


class GenerateRequest(Struct, frozen=True):
    """One request, validated, of any contract.

    Args:
        request_id: the caller's label, or one made here.
        labelled: whether the body gave it; only such a label is unique among those in flight, as a header
            may be an orchestrator's own, the same for all it asks.
        generation_id: the gateway's own id; keys the ledger.
        model: OpenAI's ``model``: base model, adapter id or backend alias; ``None`` in the native contract.
        user: OpenAI's stable id of an end user; for the ledger.
        raw_prompt: a text completion's prompt, text or token ids; ``messages`` is empty then.
        context: volatile fields, placed after the shared prefix.
        extra: fields of the body that are the backend's affair; ``needs`` is what it must have for them.
        dropped: unknown fields of messages, which no backend is given: a prompt has roles and texts.
        truncate: old turns may be left out where the conversation is too long.
        call_format: the checked shape of an answer that calls tools as text, for an engine bound to it.
        template_kwargs: variables that the caller sets for the chat template.
        fields: the body's own names for fields: ``max_tokens`` may have been ``max_completion_tokens``.
        images: base64 of the body's long images, by the marks that their URLs have in its place.
        arrived_at, deadline: seconds on the injected clock.
        trace_parent, trace_state: the caller's W3C trace context, if it sent a valid one.
        trace_id: 32 hex digits, reported to the caller: its own trace, or one made at the edge.
    """

    request_id: str
    generation_id: str
    contract: Contract
    caller: Caller
    arrived_at: float
    created: int
    messages: tuple[Message, ...] = ()
    raw_prompt: str | tuple[int, ...] | None = None
    route: str | None = None
    model: str | None = None
    session_id: str | None = None
    user: str | None = None
    intent: str | None = None
    locale: str | None = None
    adapter_id: str | None = None
    prompt_version: str | None = None
    chunks: tuple[EvidenceChunk, ...] = ()
    context: Mapping[str, object] = EMPTY
    sampling: Sampling = Sampling()
    response_format: ResponseFormat = PLAIN_TEXT
    priority: int = 0
    deadline: float | None = None
    stream: bool = False
    allow_fallback: bool = True
    trace_parent: str | None = None
    trace_state: str | None = None
    trace_id: str | None = None
    labelled: bool = True
    extra: Mapping[str, Any] = EMPTY
    needs: frozenset[Feature] = frozenset()
    dropped: tuple[str, ...] = ()
    truncate: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    call_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = EMPTY
    fields: Mapping[str, str] = NO_NAMES
    images: Mapping[str, memoryview] = MappingProxyType({})

    def in_body_terms(self, error: PublicError) -> PublicError:
        """The error with the field's name as in the body."""
        spelled = self.fields.get(error.param or "")
        if spelled is None or error.param is None:
            return error
        message = error.message
        if message.startswith(f"{error.param} "):
            message = spelled + message[len(error.param) :]
        return replace(error, param=spelled, message=message)

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """The chat template's variables, with those that vLLM sets for a ``reasoning_effort``."""
        return template_variables(self.reasoning_effort, self.template_kwargs)

    @property
    def must_call(self) -> bool:
        """Whether only the call of a tool answers it."""
        choice = self.tool_choice
        return choice is not None and choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)

    @property
    def sticky_key(self) -> str:
        """Requests of one key are drawn alike wherever a share of the traffic is drawn."""
        return self.session_id or self.generation_id


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer; ``cached_tokens`` is the part of ``input_tokens`` found in a prefix cache,
    ``reasoning_tokens`` that of ``output_tokens`` that is no text of the answer.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds from arrival: waiting before the batch, first token, and the whole."""

    queue_wait_ms: float
    ttft_ms: float | None
    total_ms: float


class TokenLogprob(Struct, frozen=True):
    """A token and how likely it was to the model; ``top`` has the most likely ones in its place, best first.

    A token is bytes: a character may be spread over several. ``logprob`` is NaN for the first token of an
    echoed prompt, which nothing comes before.
    """

    data: bytes
    logprob: float
    top: "tuple[TokenLogprob, ...]" = ()

    @property
    def text(self) -> str:
        """The token as text; what is not whole characters shows as U+FFFD."""
        return self.data.decode(errors="replace")


class Choice(Struct, frozen=True):
    """One of the texts that a request asked for; ``logprobs`` has an entry a token, when asked for."""

    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why and how the answer did not come from the backend it was meant for."""

    kind: str
    reason: str
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """What was sent, section by section, and what was not."""

    system: int
    retrieval: int
    recent_turns: int
    older_summary: int
    generation_reserve: int
    dropped_chunks: tuple[str, ...] = ()
    dropped_turns: int = 0
    cut_chunks: tuple[str, ...] = ()
    merged_chunks: tuple[str, ...] = ()
    summarized_turns: int = 0
    tools: int = 0


class Answer(Struct, frozen=True):
    """The backend-neutral answer. ``backend`` is the kind, ``backend_name`` the name in the config;
    ``adapter_id`` is the adapter that really answered.

    ``output_text``, ``finish_reason``, ``stop_sequence`` (the stop string that ended it, where it is known),
    ``logprobs``, ``reasoning`` and ``tool_calls`` are of the first
    choice, ``others`` the further ones.
    """

    request_id: str
    generation_id: str
    backend: str
    backend_name: str
    backend_version: str
    model: str
    trace_id: str
    output_text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    budget: BudgetReport
    created: int
    fallback: Fallback | None = None
    warnings: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    others: tuple[Choice, ...] = ()
    adapter_id: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    stop_sequence: str | None = None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All texts, in order."""
        first = Choice(self.output_text, self.finish_reason, self.logprobs, self.reasoning, self.tool_calls)
        return (first, *self.others)
