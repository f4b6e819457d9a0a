"""Builds the spans of a finished request: the root, its stages, the steps towards the answer, and calls.

::

    chat llama-8b                       the response (SERVER)
    ├─ canonicalize … rank, admit       one child per stage
    ├─ generate
    │  ├─ attempt worker   number 1     each attempt on a backend (CLIENT)
    │  │  ├─ call http://a:8001/v1      each call to a worker, hedges too (CLIENT)
    │  │  └─ call http://b:8001/v1
    │  ├─ attempt worker   number 2     a retry or a resumption, with the wait before it and its mode
    │  ├─ wait             for an engine that restarts
    │  ├─ refused bedrock  by admission, or a limit of the target
    │  └─ attempt bedrock  a fallback target
    └─ respond
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import orjson
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from budgeting.values import Message, Role
from observability.attributes import (
    Attributes,
    Value,
    attributes,
    call_attributes,
    edge_attributes,
    fact_attributes,
    span_name,
    step_attributes,
)
from observability.events import RequestRecord
from observability.redact import scrub as without_credentials
from observability.requestlog import outside_texts
from observability.trace_context import RootSpan
from observability.trace_facts import Content, EdgeRecord, TraceFacts
from observability.trace_steps import CallSpan, TraceStep

# Stages in the journey's order; the record has no time of the stage in which a request failed.
STAGES = ("canonicalize", "budget", "adapter", "rank", "admit", "generate", "respond")
GENERATE = "generate"
FIRST_STAGE_NUMBER = 1 << 20  # span numbers of the stages begin here; those of steps and calls are smaller
# Characters of each recorded content attribute; collectors refuse spans of megabytes.
MAX_CONTENT_CHARS = 16_384

Scrub = Callable[[str], str]
NOTHING: Attributes = {}


class OneResource(Resource):
    """A resource with a cached hash: the SDK computes it, as JSON, for each encoded span (8 us)."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(dict(resource.attributes), resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)


class _Trace:
    """Makes the spans of one trace."""

    def __init__(self, root: RootSpan, resource: Resource, scope: InstrumentationScope) -> None:
        self.root = root
        self._trace_id = int(root.trace_id, 16)
        self._resource, self._scope = resource, scope
        state = root.trace_state
        self._state = None if state is None else TraceState.from_header([state])

    def at_ns(self, after_ms: float) -> int:
        return self.root.started_ns + int(after_ms * 1e6)

    def context(self, span_id: int, *, remote: bool = False) -> SpanContext:
        return SpanContext(self._trace_id, span_id, remote, _SAMPLED, self._state)

    def span(
        self,
        parent: SpanContext | None,
        context: SpanContext,
        name: str,
        kind: SpanKind,
        began_ns: int,
        ended_ns: int,
        values: Attributes = NOTHING,
        failure: str | None = None,
        events: tuple[Event, ...] = (),
    ) -> ReadableSpan:
        return ReadableSpan(
            name=_encodable(name),
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=_known(values),
            events=events,
            kind=kind,
            status=_UNSET if failure is None else Status(StatusCode.ERROR, _encodable(failure)),
            start_time=began_ns,
            end_time=max(began_ns, ended_ns),
            instrumentation_scope=self._scope,
        )

    def timed_span(
        self,
        parent: SpanContext | None,
        part: TraceStep | CallSpan,
        name: str,
        kind: SpanKind,
        values: Attributes,
    ) -> ReadableSpan:
        context = self.context(self.root.child_id(part.number))
        began_ns, ended_ns = self.at_ns(part.began_ms), self.at_ns(part.began_ms + part.took_ms)
        return self.span(parent, context, name, kind, began_ns, ended_ns, values, part.failure)


def _known(values: Attributes) -> dict[str, Value]:
    """The known values, in a form that the encoder accepts."""
    return {
        name: _encodable(value) if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }


def _encodable(text: str) -> str:
    """``text`` without lone surrogates, which no encoder accepts: the whole batch would be lost."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def spans_of(
    root: RootSpan,
    record: RequestRecord | EdgeRecord,
    facts: TraceFacts,
    scrub: Scrub,
    resource: Resource,
    scope: InstrumentationScope,
) -> list[ReadableSpan]:
    """All spans of a request, the root first."""
    trace = _Trace(root, resource, scope)
    top = trace.context(root.span_id)
    if isinstance(record, EdgeRecord):
        name, values = f"{record.method} {record.path}", edge_attributes(record)
        values["sluice.request_id"] = without_credentials(record.request_id)
        return [_root(trace, top, name, record, values)]
    values = attributes(record) | fact_attributes(facts)
    words = " ".join(map(str, outside_texts(record)))
    if without_credentials(words) is not words:
        values = {
            name: without_credentials(value) if isinstance(value, str) else value
            for name, value in values.items()
        }
    if facts.content is not None:
        broken_off = (record.finish_reason or "error",) * len(facts.content.answers)
        values |= _content(facts.content, facts.finish_reasons or broken_off, scrub)
    return [_root(trace, top, span_name(record), record, values), *_stages(trace, top, record, facts)]


def _root(
    trace: _Trace,
    context: SpanContext,
    name: str,
    record: RequestRecord | EdgeRecord,
    values: Attributes,
) -> ReadableSpan:
    root = trace.root
    return trace.span(
        None if root.parent_id is None else trace.context(root.parent_id, remote=True),
        context,
        name,
        SpanKind.SERVER,
        root.started_ns,
        trace.at_ns(record.total_ms),
        values,
        (record.error_code or str(record.status)) if record.failed else None,
        _seams(trace, record) if isinstance(record, RequestRecord) and record.seams else (),
    )


def _stages(
    trace: _Trace, top: SpanContext, record: RequestRecord, facts: TraceFacts
) -> Iterator[ReadableSpan]:
    number, generating, at_ns = FIRST_STAGE_NUMBER, top, trace.root.started_ns
    for stage, took_ms in _with_the_last(record, facts).items():
        number += 1
        context = trace.context(trace.root.child_id(number))
        if stage == GENERATE:
            generating = context
        broken = stage not in record.stage_ms and record.failed
        began_ns, at_ns = at_ns, at_ns + int(took_ms * 1e6)
        yield trace.span(
            top,
            context,
            stage,
            SpanKind.INTERNAL,
            began_ns,
            at_ns,
            failure=record.error_code if broken else None,
        )
    for step in facts.steps:
        yield from _step(trace, record, step, generating)


def _with_the_last(record: RequestRecord, facts: TraceFacts) -> Mapping[str, float]:
    """The time of each stage, including the stage in which the request failed."""
    if record.error_code is None or "respond" in record.stage_ms or not (record.stage_ms or facts.steps):
        return record.stage_ms
    stages = dict(record.stage_ms)
    # The fallback chain runs in the stage ``generate``, whichever stage failed before it.
    if facts.steps and GENERATE not in stages:
        last = GENERATE
    else:
        passed = [place for place, stage in enumerate(STAGES) if stage in stages]
        last = STAGES[min(len(STAGES) - 1, passed[-1] + 1 if passed else 0)]
    stages[last] = max(0.0, record.total_ms - sum(stages.values()))
    return stages


def _step(
    trace: _Trace, record: RequestRecord, step: TraceStep, parent: SpanContext
) -> Iterator[ReadableSpan]:
    name = step.name if step.backend is None else f"{step.name} {step.backend}"
    kind = SpanKind.CLIENT if step.name == "attempt" else SpanKind.INTERNAL
    own = trace.timed_span(parent, step, name, kind, step_attributes(record, step))
    yield own
    for call in step.calls:
        name = f"call {call.target}"
        yield trace.timed_span(own.context, call, name, SpanKind.CLIENT, call_attributes(call))


def _seams(trace: _Trace, record: RequestRecord) -> tuple[Event, ...]:
    return tuple(
        Event(
            "sluice.seam",
            {
                "sluice.seam.from": seam.source,
                "sluice.seam.to": seam.target,
                "sluice.seam.mode": seam.mode,
                "sluice.seam.tokens": seam.tokens,
            },
            trace.at_ns(seam.after_ms),
        )
        for seam in record.seams or ()
    )


def _content(content: Content, finish_reasons: Sequence[str], scrub: Scrub) -> dict[str, Value]:
    """The recorded messages as attributes of the conventions, in JSON; redacted first, then cut."""

    def shown(text: str) -> str:
        return _encodable(scrub(text)[:MAX_CONTENT_CHARS])

    instructions: list[dict[str, object]] = []
    asked: list[dict[str, object]] = []
    for one in content.messages:
        if one.role is Role.SYSTEM:
            instructions += _parts(one, shown)
        else:
            asked.append({"role": one.role.value, "parts": _parts(one, shown)})
    answered: list[dict[str, object]] = [
        {"role": one.role.value, "parts": _parts(one, shown), "finish_reason": reason}
        for one, reason in zip(content.answers, finish_reasons, strict=False)
    ]
    values: dict[str, Value] = {
        "gen_ai.input.messages": _json(asked),
        "gen_ai.output.messages": _json(answered),
    }
    if instructions:
        values["gen_ai.system_instructions"] = _json(instructions)
    return values


def _parts(message: Message, shown: Scrub) -> list[dict[str, object]]:
    if message.tool_call_id is not None:
        answered = {"id": message.tool_call_id, "response": shown(message.content)}
        return [{"type": "tool_call_response", **answered}]
    parts: list[dict[str, object]] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": shown(message.reasoning)})
    if message.content or not message.tool_calls:
        parts.append({"type": "text", "content": shown(message.content)})
    for call in message.tool_calls:
        called = {"id": call.id, "name": call.name, "arguments": shown(call.arguments)}
        parts.append({"type": "tool_call", **called})
    return parts


def _json(parts: list[dict[str, object]]) -> str:
    """The newest parts, which include the question, as about :data:`MAX_CONTENT_CHARS` characters of JSON."""
    newest: list[dict[str, object]] = []
    room = MAX_CONTENT_CHARS
    for part in reversed(parts):
        data = orjson.dumps(part)
        if newest and len(data) > room:
            break
        room -= len(data)
        newest.insert(0, part)
    return orjson.dumps(newest).decode()
