"""The internal values of a request, and those that its answer shares with its events."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from msgspec import Struct, structs

from accounting.keys import CallerRole as CallerRole
from budgeting.values import EvidenceChunk, Message, Tool, ToolChoice
from gateway.contracts.features import Feature
from gateway.contracts.origin import Caller as Caller
from gateway.contracts.origin import RequestOrigin
from gateway.errors import PublicError

EMPTY: Mapping[Any, Any] = MappingProxyType({})


class Contract(StrEnum):
    """The public contract (API) that a request uses."""

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
    CONTENT_FILTER = "content_filter"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ERROR = "error"
    DEGRADED = "degraded"


WHOLE = (FinishReason.STOP, FinishReason.DEGRADED)
CUT_SHORT = (FinishReason.LENGTH, FinishReason.DEADLINE, FinishReason.CANCELLED, FinishReason.ERROR)


class Sampling(Struct, frozen=True):
    """The caller's sampling parameters; ``None`` and empty mean "the backend's default".

    Values are validated at the edge: finite numbers inside their documented ranges. ``echo``: the text begins
    with its prompt, and log-probabilities with those of the prompt's tokens; ``prompt_only``: it ends there.
    vLLM's fields: ``ignore_eos``: the model's EOS token does not end a text; ``min_tokens``: before so many
    tokens only the length limit ends a text; ``stop_token_ids`` end a text as the EOS token does.
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
    logit_bias: Mapping[int, float] = EMPTY
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


# For code that every request runs: the lookup of an enum's member costs more than a call (Python 3.11).
NATIVE, TEXT, CALLER = Contract.NATIVE, FormatType.TEXT, CallerRole.CALLER


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The requested shape; ``spec`` is the schema or the choices as JSON text, the pattern or the grammar.

    ``param`` is the field of the body that asks for it, ``grammar_bytes`` the memory that its grammar takes.
    ``strict``: the caller's flag, without which a hosted service may ignore a schema.
    """

    type: FormatType = FormatType.TEXT
    spec: str = ""
    param: str = field(default="response_format", compare=False, repr=False)
    grammar_bytes: int = field(default=0, compare=False, repr=False)
    strict: bool | None = field(default=None, compare=False, repr=False)


PLAIN_TEXT = ResponseFormat()


def template_variables(effort: str | None, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The chat template's variables: the caller's, and those that vLLM sets for a ``reasoning_effort``."""
    thinking = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {**thinking, **given}


class GenerateRequest(RequestOrigin, frozen=True, kw_only=True):
    """A validated request of any contract.

    Args:
        labelled: whether the body has the label. Only then it must be unique among the requests in flight: an
            orchestrator may send the same label in the header of all its requests.
        model: OpenAI's ``model``: base model, adapter id or backend alias; ``None`` in the native contract.
        user: OpenAI's stable id of an end user; for the ledger.
        raw_prompt: a text completion's prompt, text or token ids; ``messages`` is empty then.
        context: volatile fields, placed after the shared prefix.
        extra: fields of the body that are only passed to the backend.
        needs: the features that the backend must have for this request.
        dropped: paths of messages' unknown fields, which no backend receives: a prompt has roles and texts.
        truncate: whether old turns may be left out if the conversation is too long.
        call_format: the checked shape of an answer that calls tools as text, for an engine that enforces it.
        checked_s: seconds that the check of its shapes took, with the wait for other checks of the tenant.
        template_kwargs: the caller's variables for the chat template.
        fields: the body's names of fields, by internal name: ``max_tokens`` may be ``max_completion_tokens``.
        images: base64 of the body's long images, by the marks that replace it in their URLs.
        deadline: seconds on the injected clock.
    """

    contract: Contract
    messages: tuple[Message, ...] = ()
    raw_prompt: str | tuple[int, ...] | None = None
    route: str | None = None
    model: str | None = None
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
    labelled: bool = True
    extra: Mapping[str, Any] = EMPTY
    needs: frozenset[Feature] = frozenset()
    dropped: tuple[str, ...] = ()
    truncate: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    call_format: ResponseFormat | None = None
    checked_s: float = 0.0
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = EMPTY
    fields: Mapping[str, str] = EMPTY
    images: Mapping[str, memoryview] = EMPTY

    def in_body_terms(self, error: PublicError) -> PublicError:
        """The error with the body's name of the field instead of the internal one."""
        spelled = self.fields.get(error.param or "")
        if spelled is None or error.param is None:
            return error
        # The places of a field in messages; elsewhere its name may be an ordinary word.
        named = rf"(^|: |supports ){re.escape(error.param)}(?=[ ,:;]|$)"
        message = re.sub(named, lambda found: found[1] + spelled, error.message, count=1)
        return replace(error, param=spelled, message=message)

    @property
    def template_variables(self) -> Mapping[str, Any]:
        return template_variables(self.reasoning_effort, self.template_kwargs)

    @property
    def must_call(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.forces_call

    @property
    def is_shaped(self) -> bool:
        """Whether a grammar dictates the answer's form, and with it where the answer ends."""
        return self.must_call or self.response_format.type is not TEXT

    @property
    def sticky_key(self) -> str:
        """The key for drawing a share of the traffic: requests with the same key get the same result."""
        return self.session_id or self.generation_id


class AnswerPart(Struct, frozen=True):
    """An object in answers. It is a struct because every request makes some: a dataclass takes ten times as
    long. The OpenAPI document describes it as the dataclass with the same fields.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type, handler: Callable[[type], Any]) -> Any:
        fields: list[Any] = [
            (one.name, one.type) if one.required else (one.name, one.type, one.default)
            for one in structs.fields(cls)
        ]
        return handler(make_dataclass(cls.__name__, fields, namespace={"__doc__": cls.__doc__}))


class Usage(AnswerPart, frozen=True):
    """Tokens of one answer. ``cached_tokens`` is the part of ``input_tokens`` found in a prefix cache,
    ``cache_write_tokens`` the part that was written to it, if the backend charges for that,
    ``reasoning_tokens`` the part of ``output_tokens`` that is not in the answer's text.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cache_write_tokens: int = 0


class TokenLogprob(Struct, frozen=True):
    """A token and its log-probability; ``top`` has the most likely tokens at its position, best first.

    ``data`` is bytes because a token may be a part of a character. ``logprob`` is NaN for the first token of
    an echoed prompt, since no token precedes it.
    """

    data: bytes
    logprob: float
    top: "tuple[TokenLogprob, ...]" = ()

    @property
    def text(self) -> str:
        """The token as text; incomplete characters are replaced by U+FFFD."""
        return self.data.decode(errors="replace")
