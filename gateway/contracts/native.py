"""The native contract's request: strict pydantic at the edge, :class:`GenerateRequest` inside."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field
from typing_extensions import TypeAliasType

from budgeting.values import EvidenceChunk, Message, Role
from gateway.contracts.fields import (
    MAX_CHUNKS,
    Body,
    DeadlineMs,
    Label,
    MaxTokens,
    Name,
    Priority,
    Seed,
    Stop,
    Temperature,
    Text,
    TopK,
    TopP,
    stops,
)
from gateway.contracts.formats import FormatBody, from_format
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.plain import check_plain
from gateway.contracts.turns import check_count, check_latest
from gateway.contracts.values import EMPTY, Contract, GenerateRequest, Sampling

DEFAULT_ROUTE: Final = "self_hosted_generation"
"""The route of requests that name none (the public surface)."""


class NativeMessage(Body):
    """One message: who speaks, and plain text."""

    role: Literal["system", "user", "assistant"]
    content: Text


class NativeChunk(Body):
    """A piece of retrieved evidence."""

    chunk_id: Label
    source_type: Name
    text: Text
    score: float | None = None


class NativeSampling(Body):
    """How to sample; everything is optional."""

    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop: Stop | None = None
    seed: Seed | None = None


NativeMessages = TypeAliasType("NativeMessages", Annotated[list[NativeMessage], Field(fail_fast=True)])
NativeChunks = TypeAliasType(
    "NativeChunks", Annotated[list[NativeChunk], Field(max_length=MAX_CHUNKS, fail_fast=True)]
)


class NativeRequest(Body):
    """The body of ``POST /v1/generate``, of ``/invocations`` and of the WebSocket's first frame."""

    request_id: Name | None = None
    session_id: Label | None = None
    route: Name = DEFAULT_ROUTE
    intent: Name | None = None
    locale: Name | None = None
    adapter_id: Name | None = None
    prompt_version: Name | None = None
    messages: NativeMessages
    retrieval_chunks: NativeChunks | None = None
    context: dict[str, Any] | None = None
    sampling: NativeSampling | None = None
    response_format: FormatBody | None = None
    priority: Priority = 0
    deadline_ms: DeadlineMs | None = None
    stream: bool = False


def to_chunks(chunks: list[NativeChunk] | None) -> tuple[EvidenceChunk, ...]:
    """The evidence as the budget stage knows it."""
    return tuple(EvidenceChunk(one.chunk_id, one.source_type, one.text, one.score) for one in chunks or ())


def to_request(body: NativeRequest, origin: RequestOrigin) -> GenerateRequest:
    """Map a validated body to the inside.

    Raises:
        InvalidRequest: the conversation, the context or the format breaks a rule that types cannot say.
    """
    check_count(len(body.messages), origin.max_messages)
    messages = tuple(Message(Role(one.role), one.content) for one in body.messages)
    check_latest(messages)
    if body.context:
        check_plain(body.context, "context")
    return GenerateRequest(
        request_id=body.request_id or origin.request_id,
        generation_id=origin.generation_id,
        contract=Contract.NATIVE,
        caller=origin.caller,
        arrived_at=origin.arrived_at,
        created=origin.created,
        messages=messages,
        route=body.route,
        session_id=body.session_id,
        intent=body.intent,
        locale=body.locale,
        adapter_id=body.adapter_id,
        prompt_version=body.prompt_version,
        chunks=to_chunks(body.retrieval_chunks),
        context=body.context or EMPTY,
        sampling=_sampling(body.sampling),
        response_format=from_format(body.response_format),
        priority=origin.priority(body.priority),
        deadline=origin.deadline(body.deadline_ms),
        stream=body.stream,
        allow_fallback=origin.allow_fallback,
        trace_parent=origin.trace_parent,
        trace_state=origin.trace_state,
        trace_id=origin.trace_id,
        labelled=body.request_id is not None,
    )


def _sampling(body: NativeSampling | None) -> Sampling:
    if body is None:
        return Sampling()
    return Sampling(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=stops(body.stop),
    )
