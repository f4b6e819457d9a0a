"""A finished request as spans: the root, its stages, below them the steps towards the answer, and calls.

::

    chat llama-8b                       the response (SERVER)
    ├─ canonicalize … rank, admit       a child per stage
    ├─ generate
    │  ├─ attempt worker   number 1     each attempt on a backend (CLIENT)
    │  │  ├─ call http://a:8001/v1      each call to a worker, hedges too (CLIENT)
    │  │  └─ call http://b:8001/v1
    │  ├─ attempt worker   number 2     a retry, or a continuation: with the wait before it and its mode
    │  ├─ wait             an engine that comes back
    │  ├─ refused bedrock  admission, or a bound of the leg
    │  └─ attempt bedrock  a leg of the fallback chain
    └─ respond
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import orjson

from observability.attributes import (
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
from observability.requestlog import others_words
from observability.trace_encode import (
    ATTRIBUTE,
    KIND_CLIENT,
    KIND_INTERNAL,
    KIND_SERVER,
    Parent,
    attributes_of,
    event,
    failed,
    span,
    state,
)
from observability.trace_facts import Content, EdgeRecord, StepFact, TraceFacts
from observability.tracing import RootSpan

# Stages in the journey's order; the one in which a request ended has no time of its own in the record.
STAGES = ("canonicalize", "budget", "adapter", "rank", "admit", "generate", "respond")
GENERATE = "generate"
# Numbers of the stages' spans begin here; those of steps and calls are below (``gateway.trail``).
FIRST_STAGE_NUMBER = 1 << 20
# Characters of each recorded content attribute; collectors refuse spans of megabytes.
MAX_CONTENT_CHARS = 16_384

Scrub = Callable[[str], str]


class _Trace:
    """Makes the spans of one trace."""

    def __init__(self, root: RootSpan) -> None:
        self.root = root
        self.trace_id = bytes.fromhex(root.trace_id)

    def at_ns(self, after_ms: float) -> int:
        return self.root.started_ns + int(after_ms * 1e6)

    def below(self, parent_id: int) -> Parent:
        return Parent.of(self.trace_id, parent_id)


def spans_of(
    root: RootSpan, record: RequestRecord | EdgeRecord, facts: TraceFacts, scrub: Scrub
) -> list[bytes]:
    """All spans of a request, the root first."""
    trace = _Trace(root)
    if isinstance(record, EdgeRecord):
        name, values = f"{record.method} {record.path}", edge_attributes(record)
        values["sluice.request_id"] = without_credentials(record.request_id)
        return [_root(trace, name, record, values)]
    told = attributes(record) | fact_attributes(facts)
    words = others_words(record)
    if without_credentials(words) is not words:
        told = {
            name: without_credentials(value) if isinstance(value, str) else value
            for name, value in told.items()
        }
    if facts.content is not None:
        told |= _content(facts.content, scrub)
    return [_root(trace, span_name(record), record, told), *_stages(trace, record, facts)]


def _root(trace: _Trace, name: str, record: RequestRecord | EdgeRecord, values: dict[str, Value]) -> bytes:
    root, more = trace.root, [attributes_of(ATTRIBUTE, values)]
    if isinstance(record, RequestRecord) and record.seams:
        more.append(_seams(trace, record))
    if record.failed:
        more.append(failed(record.error_code or str(record.status)))
    if root.trace_state is not None:
        more.append(state(root.trace_state))
    return span(
        Parent.of(trace.trace_id, root.parent_id, remote=True),
        root.span_id,
        name,
        KIND_SERVER,
        root.started_ns,
        trace.at_ns(record.total_ms),
        b"".join(more),
    )


def _stages(trace: _Trace, record: RequestRecord, facts: TraceFacts) -> Iterator[bytes]:
    root, number = trace.root, FIRST_STAGE_NUMBER
    below, generating, at_ns = trace.below(root.span_id), root.span_id, root.started_ns
    for stage, took_ms in _with_the_last(record, facts).items():
        number += 1
        span_id = root.child_id(number)
        if stage == GENERATE:
            generating = span_id
        more = b""
        if stage not in record.stage_ms and record.failed and record.error_code is not None:
            more = failed(record.error_code)
        began_ns, at_ns = at_ns, at_ns + int(took_ms * 1e6)
        yield span(below, span_id, stage, KIND_INTERNAL, began_ns, at_ns, more)
    for step in facts.steps:
        yield from _step(trace, record, step, trace.below(generating))


def _with_the_last(record: RequestRecord, facts: TraceFacts) -> Mapping[str, float]:
    """The stages, and the one in which the request was broken off."""
    if record.error_code is None or "respond" in record.stage_ms or not (record.stage_ms or facts.steps):
        return record.stage_ms
    stages = dict(record.stage_ms)
    # The fallback chain is walked in the stage of generating, whatever it begins after.
    if facts.steps and GENERATE not in stages:
        last = GENERATE
    else:
        passed = [place for place, stage in enumerate(STAGES) if stage in stages]
        last = STAGES[min(len(STAGES) - 1, passed[-1] + 1 if passed else 0)]
    stages[last] = max(0.0, record.total_ms - sum(stages.values()))
    return stages


def _step(trace: _Trace, record: RequestRecord, step: StepFact, parent: Parent) -> Iterator[bytes]:
    root, span_id = trace.root, trace.root.child_id(step.number)
    more = attributes_of(ATTRIBUTE, step_attributes(record, step))
    yield span(
        parent,
        span_id,
        step.name if step.backend is None else f"{step.name} {step.backend}",
        KIND_CLIENT if step.name == "attempt" else KIND_INTERNAL,
        trace.at_ns(step.began_ms),
        trace.at_ns(step.began_ms + step.took_ms),
        more if step.failure is None else more + failed(step.failure),
    )
    for call in step.calls:
        more = attributes_of(ATTRIBUTE, call_attributes(call))
        yield span(
            trace.below(span_id),
            root.child_id(call.number),
            f"call {call.target}",
            KIND_CLIENT,
            trace.at_ns(call.began_ms),
            trace.at_ns(call.began_ms + call.took_ms),
            more if call.failure is None else more + failed(call.failure),
        )


def _seams(trace: _Trace, record: RequestRecord) -> bytes:
    return b"".join(
        [
            event(
                "sluice.seam",
                trace.at_ns(seam.after_ms),
                {
                    "sluice.seam.from": seam.source,
                    "sluice.seam.to": seam.target,
                    "sluice.seam.mode": seam.mode,
                    "sluice.seam.tokens": seam.tokens,
                },
            )
            for seam in record.seams or ()
        ]
    )


def _content(content: Content, scrub: Scrub) -> dict[str, Value]:
    """The conventions' messages, as JSON; through the redaction first, then cut."""
    heard = [
        _message(role, scrub(text)[:MAX_CONTENT_CHARS]) for role, text in content.messages if role != "system"
    ]
    ordered = [_text(scrub(text)[:MAX_CONTENT_CHARS]) for role, text in content.messages if role == "system"]
    said = [_message("assistant", scrub(content.output)[:MAX_CONTENT_CHARS])]
    values: dict[str, Value] = {
        "gen_ai.input.messages": _json(heard),
        "gen_ai.output.messages": _json(said),
    }
    if ordered:
        values["gen_ai.system_instructions"] = _json(ordered)
    return values


def _text(text: str) -> dict[str, object]:
    return {"type": "text", "content": text}


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [_text(text)]}


def _json(parts: list[dict[str, object]]) -> str:
    """At most :data:`MAX_CONTENT_CHARS` or so: the newest parts, since the last turn is what was asked."""
    kept: list[dict[str, object]] = []
    room = MAX_CONTENT_CHARS
    for part in reversed(parts):
        data = orjson.dumps(_whole(part))
        if kept and len(data) > room:
            break
        room -= len(data)
        kept.insert(0, part)
    return orjson.dumps(_whole(kept)).decode()


def _whole(value: object) -> object:
    """Without lone surrogates, which no encoder takes."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    return value
