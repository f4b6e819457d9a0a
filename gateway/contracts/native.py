"""The native contract's request: strict pydantic at the edge, :class:`GenerateRequest` inside."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import structs
from pydantic import Field

from budgeting.values import EvidenceChunk, Message, Role
from gateway.contracts.checks import check_count, check_latest, check_plain
from gateway.contracts.features import Feature
from gateway.contracts.fields import (
    MAX_CHUNKS,
    Body,
    DeadlineMs,
    Label,
    Listed,
    MaxTokens,
    Name,
    Priority,
    Seed,
    Stop,
    Temperature,
    Text,
    TextOr,
    TopK,
    TopP,
    stops,
)
from gateway.contracts.formats import FormatBody, from_format
from gateway.contracts.images import ImageUrlBody, PartBody, image_features, read_content, with_parts
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.tool_fields import CallFields, ToolFields
from gateway.contracts.tools import holds_calls, message_of, tool_request
from gateway.contracts.values import EMPTY, NATIVE, Contract, GenerateRequest, Sampling

DEFAULT_ROUTE: Final = "self_hosted_generation"
"""The route of requests that name none; part of the public API."""


class NativeImageUrl(ImageUrlBody, Body):
    """Where an image is: an address, or a ``data:`` URL that holds it."""


class NativePart(PartBody, Body):
    """A part of a message: a text, or an image in a user's message or a tool's result."""

    type: Literal["text", "image_url"]
    image_url: NativeImageUrl | None = None


class NativeMessage(CallFields, Body):
    """One message: its role, and its text or parts; null if an assistant only called tools."""

    role: Literal["system", "user", "assistant", "tool"]
    content: TextOr[NativePart] | None = None


class NativeChunk(Body):
    """A piece of retrieved evidence."""

    chunk_id: Label
    source_type: Name
    text: Text
    score: float | None = None


class NativeSampling(Body):
    """Sampling parameters; all are optional."""

    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop: Stop | None = None
    seed: Seed | None = None


class SluiceFields(Body):
    """Fields of the native contract that an OpenAI body may have too, in its object ``sluice``."""

    request_id: Name | None = None
    session_id: Label | None = None
    route: Name | None = None
    intent: Name | None = None
    locale: Name | None = None
    adapter_id: Name | None = None
    prompt_version: Name | None = None
    retrieval_chunks: Annotated[Listed[NativeChunk], Field(max_length=MAX_CHUNKS)] | None = None
    context: dict[str, Any] | None = None
    deadline_ms: DeadlineMs | None = None


NO_FIELDS: Final = SluiceFields()


class NativeRequest(SluiceFields, ToolFields):
    """The body of ``POST /v1/generate``, of ``/invocations`` and of the WebSocket's first frame."""

    route: Name = DEFAULT_ROUTE
    messages: Listed[NativeMessage]
    sampling: NativeSampling | None = None
    response_format: FormatBody | None = None
    priority: Priority = 0
    stream: bool = False


_FIELDS: Final[Mapping[str, str]] = {name: f"sampling.{name}" for name in NativeSampling.model_fields}
"""Internal errors name these fields without a prefix; in this contract they are in ``sampling``."""


def build_request(
    origin: RequestOrigin,
    contract: Contract,
    native: SluiceFields,
    *,
    needs: frozenset[Feature],
    fields: Mapping[str, str],
    messages: tuple[Message, ...] = (),
    **own: Any,
) -> GenerateRequest:
    """The request of any contract; ``own``: fields of :class:`GenerateRequest` that the contract sets itself.

    ``fields`` are the body's names without those in ``sluice``. Raises InvalidRequest: the context is not
    plain JSON.
    """
    if contract is not NATIVE and native is not NO_FIELDS:
        fields = {**fields, **{name: f"sluice.{name}" for name in native.__pydantic_fields_set__}}
    if native.context:
        check_plain(native.context, "context" if contract is NATIVE else "sluice.context")
    chunks = native.retrieval_chunks or ()
    own = {**structs.asdict(origin), "request_id": native.request_id or origin.request_id, **own}
    return GenerateRequest(
        contract=contract,
        route=native.route,
        intent=native.intent,
        locale=native.locale,
        adapter_id=native.adapter_id,
        prompt_version=native.prompt_version,
        chunks=tuple([EvidenceChunk(one.chunk_id, one.source_type, one.text, one.score) for one in chunks]),
        context=native.context or EMPTY,
        deadline=None if native.deadline_ms is None else origin.arrived_at + native.deadline_ms / 1000,
        labelled=native.request_id is not None,
        messages=messages,
        fields=fields,
        needs=needs | image_features(messages),
        **own,
    )


def _message(one: NativeMessage, at: str) -> Message:
    text, parts = read_content(one.content, at)
    return with_parts(message_of(one, Role(one.role), text, at), parts)


def to_request(body: NativeRequest, origin: RequestOrigin) -> GenerateRequest:
    """Convert a validated body to a request. Raises InvalidRequest: a rule that types cannot express."""
    check_count(len(body.messages), origin.max_messages)
    messages = tuple([_message(one, f"messages.{index}") for index, one in enumerate(body.messages)])
    check_latest(messages)
    tools, needs = tool_request(body, in_history=holds_calls(messages))
    sampling = body.sampling or NativeSampling()
    return build_request(
        origin,
        NATIVE,
        body,
        messages=messages,
        session_id=body.session_id,
        sampling=Sampling(**{**dict(sampling), "stop": stops(sampling.stop)}),
        response_format=from_format(body.response_format),
        priority=origin.capped(body.priority),
        stream=body.stream,
        fields=_FIELDS,
        needs=needs,
        **tools,
    )
