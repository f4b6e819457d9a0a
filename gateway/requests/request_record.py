"""The record of a request for metrics, logs and its trace.

The journey calls the recorder: each method takes values and returns nothing. No stage reads from it. A
request that the HTTP edge refused, or served without the journey, has a record too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from accounting.values import UsageRow
from adapters.selection import Lease
from budgeting.values import Message, Plan, Role
from gateway.contracts.answer import Answer
from gateway.contracts.openai_answer import sent_status
from gateway.contracts.origin import EdgeRequest, RequestOrigin
from gateway.contracts.values import GenerateRequest
from gateway.errors import Internal, PublicError
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.tool_calls import CallOutcome
from gateway.prompts.canonical import Canonical
from gateway.prompts.prefixes import Prefix
from gateway.requests.timing import StageTimer
from gateway.routing.revision import Revision
from gateway.routing.target import Target
from observability.events import DISCONNECTED, RequestRecord, ToolCallCounts
from observability.trace_context import RootSpan
from observability.trace_facts import SAMPLING_NAMES, Content, EdgeRecord, TraceFacts
from observability.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Reporter:
    """Opens the trace and the record of each request; ``emit`` takes each finished one.

    ``log_defect`` takes an error that is a defect of the gateway, and a request id.
    """

    tracing: Tracing
    emit: Callable[[RequestRecord | EdgeRecord], None]
    log_defect: Callable[[BaseException, str], None]
    clock: Callable[[], float]

    def trace(self, request: RequestOrigin | EdgeRequest) -> RootSpan:
        """Start the request's root span, as of the request's arrival."""
        return self.tracing.begin(
            request.trace_parent,
            trace_id=request.trace_id,
            trace_state=request.trace_state,
            ago_s=self.clock() - request.arrived_at,
        )

    def report(self, span: RootSpan, record: RequestRecord | EdgeRecord) -> None:
        """End the span of a request without a recorder, and emit its record."""
        self.emit(record)  # before its trace: this marks the lines of batches
        self.tracing.finish(span, record)

    def edge(self, request: EdgeRequest) -> None:
        """Report a request that no journey reports."""
        span = self.trace(request)
        total_ms = max(0.0, self.clock() - request.arrived_at) * 1000
        self.report(span, _edge_record(request, span.trace_id, total_ms))


class RequestRecorder(Struct, eq=False):
    """Collects the facts of one request; emits its record and ends its span when the ``with`` block ends."""

    _reporter: Reporter
    _request: GenerateRequest
    _span: RootSpan
    _stream: AnswerStream
    _timer: StageTimer
    _target: Target | None = None
    _revision: Revision | None = None
    _canonical: Canonical | None = None
    _plan: Plan | None = None
    _lease: Lease | None = None
    _drawn: str | None = None
    _prefix: Prefix | None = None
    _answer: Answer | None = None
    _bill: UsageRow | None = None
    _failure: tuple[int, str, str] | None = None
    _error: PublicError | None = None

    def found(self, target: Target, revision: Revision) -> None:
        self._target, self._revision = target, revision

    def canonicalized(self, canonical: Canonical) -> None:
        self._canonical = canonical

    def prepared(self, plan: Plan, lease: Lease, drawn: str | None, prefix: Prefix) -> None:
        """Record the plan, the adapter's lease, the backend drawn by weight, and the expected prefix."""
        self._plan, self._lease, self._drawn, self._prefix = plan, lease, drawn, prefix

    def answered(self, answer: Answer, plan: Plan) -> None:
        """Record the complete answer; ``plan`` is the prompt that was sent for it."""
        self._answer, self._plan = answer, plan

    def billed(self, row: UsageRow) -> None:
        self._bill = row

    def failed(self, public: PublicError, error: Exception) -> None:
        """Record the error that ended the request; log a defect of the gateway with its traceback."""
        status = 200 if self._stream.committed else sent_status(public, self._request.contract)
        self._failure, self._error = (status, public.code, "error"), public
        if public.code == Internal.code:
            self._reporter.log_defect(error, self._request.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sent = "respond" in self._timer.ended_at
        if self._failure is None and not sent and isinstance(error, asyncio.CancelledError):
            self._failure = DISCONNECTED, "cancelled", "cancelled"
        tracing, record = self._reporter.tracing, self._record()
        self._reporter.emit(record)  # before its trace: this marks the lines of batches
        if tracing.exporting:
            tracing.finish(self._span, record, self._facts, slow=self._slow(record))

    def _record(self) -> RequestRecord:
        request, answer, target, stream = self._request, self._answer, self._target, self._stream
        stage_ms, lease, bill = self._timer.stage_ms(), self._lease, self._bill
        status, error_code, finish_reason = self._failure or (200, None, None)
        queue_wait_ms = answer.timings.queue_wait_ms if answer else stream.total_wait_s * 1000
        # The adapter that answered, or the requested one if no model answered.
        adapted = answer if answer and answer.usage.input_tokens else lease
        record = RequestRecord(
            request.request_id,
            request.generation_id,
            self._span.trace_id,
            request.caller.tenant,
            request.contract._value_,  # the property costs two calls
            status,
            self._timer.total_ms(),
            model=answer.model if answer else request.model,
            error_code=error_code,
            finish_reason=answer.finish_reason._value_ if answer else finish_reason,
            input_tokens=answer.usage.input_tokens if answer else stream.input_tokens,
            output_tokens=answer.usage.output_tokens if answer else stream.tokens,
            cached_tokens=answer.usage.cached_tokens if answer else stream.cached_tokens,
            stage_ms=stage_ms,
            drawn=self._drawn,
        )
        # Not in the call: with more keywords it would build a dict, which takes twice the time of the rest.
        record.key_id, record.priority = request.caller.key_id, request.priority
        record.intent, record.locale, record.stream = request.intent, request.locale, request.stream
        record.adapter_id = adapted.adapter_id if adapted else None
        record.ttft_ms = self._timer.at_ms(stream.first_at)
        # Without waiting for a slot, and without the backend.
        record.overhead_ms = (
            sum(stage_ms.values()) - stage_ms.get("admit", 0.0) - stage_ms.get("generate", 0.0)
        )
        if target is not None:
            record.route, record.prompt_version = target.route.name, target.prompt_version
        if self._revision is not None:
            record.revision = self._revision.number
        if lease is not None:
            record.adapter_rule = lease.rule
        if answer is not None:
            record.backend, record.backend_name = answer.backend, answer.backend_name
            record.backend_version = answer.backend_version
            if answer.fallback is not None:
                record.fallback_kind, record.fallback_reason = answer.fallback.kind, answer.fallback.reason
        elif bill is not None:
            record.backend_name = bill.backend_name
        if self._error is not None:
            record.error_param, record.error_message = self._error.param, self._error.message
        if stream.events is not None or stream.call_outcomes:
            record.tool_calls = self._tool_calls()
        if stream.started_at is not None:
            record.queue_wait_ms = queue_wait_ms
        if "generate" in stage_ms:
            # The time in backends is without queues; the first backend's admission is a separate stage.
            queued_ms = max(0.0, queue_wait_ms - stage_ms.get("admit", 0.0))
            record.generation_ms = max(0.0, stage_ms["generate"] - queued_ms)
        record.seams = tuple(stream.resumes) or None
        self._add_prompt(record)
        if request.session_id is not None:
            record.session = hash((request.caller.tenant, request.session_id))
        # The front counts the cost of its own requests.
        if bill is not None and bill.price_version is not None and bill.kind != "front":
            record.cost_nanousd = bill.cost_nanousd
        return record

    def _add_prompt(self, record: RequestRecord) -> None:
        answer, plan, canonical, prefix = self._answer, self._plan, self._canonical, self._prefix
        if plan is not None:
            record.dropped_chunks, record.dropped_turns = len(plan.dropped_chunks), plan.dropped_turns
            record.cut_chunks, record.merged_chunks = len(plan.cut_chunks), len(plan.merged_chunks)
            record.summarized_turns = plan.summarized_turns
        if prefix is not None:
            record.prefix_fingerprint = prefix.fingerprint
            # Cached and expected tokens are comparable only on the backend for which they were expected.
            if prefix.fingerprint and answer is not None and answer.backend_name == prefix.backend:
                record.prefix_tokens, record.prefix_expected_tokens = prefix.tokens, prefix.expected
                record.prefix_cached_tokens = min(answer.usage.cached_tokens, prefix.tokens)
        if canonical is not None and canonical.findings:
            record.volatile, record.volatile_action = canonical.kinds, canonical.action

    def _tool_calls(self) -> ToolCallCounts:
        """Count the tool calls by outcome; calls of an unchecked answer were cut, or failed with it."""
        stream = self._stream
        counts = {outcome.value: number for outcome, number in stream.call_outcomes.items()}
        if not stream.ended and stream.call_count:
            unchecked = CallOutcome.FAILED if self._answer is None else CallOutcome.CUT
            counts[unchecked.value] = counts.get(unchecked.value, 0) + stream.call_count
        return ToolCallCounts(**counts)

    def _slow(self, record: RequestRecord) -> bool:
        if self._target is None or record.batch_line:
            return False
        slo = self._target.route.config.slo
        return (record.ttft_ms or 0.0) > slo.ttft_ms or record.total_ms > slo.total_ms

    def _facts(self) -> TraceFacts:
        """Return the trace's facts that are not in the record; called only for exported traces."""
        sampling, steps = self._request.sampling, self._stream.steps.up_to_now()
        refused = next((step.failure for step in steps if step.name == "refused"), None)
        at_once = "admit" in self._timer.ended_at
        decision = None
        if refused is not None and not at_once:
            decision = "refused"
        elif self._stream.steps.shortened:
            decision = "shortened"
        elif at_once or any(step.name == "attempt" for step in steps):
            decision = "admitted"
        return TraceFacts(
            steps=steps,
            admission=decision,
            admission_reason=refused if decision == "refused" else None,
            sampling={name: getattr(sampling, name) for name in SAMPLING_NAMES},
            choices=sampling.n,
            finish_reasons=tuple([one.finish_reason.value for one in self._answer.choices])
            if self._answer
            else (),
            content=self._content() if self._target and self._target.route.config.record_content else None,
        )

    def _content(self) -> Content:
        request, stream = self._request, self._stream
        messages = [one.without_parts if one.parts else one for one in request.messages]
        raw = request.raw_prompt
        if raw is not None:
            messages = [Message(Role.USER, raw if isinstance(raw, str) else f"{len(raw)} token ids")]
        answers = [
            Message(
                Role.ASSISTANT,
                stream.text(index),
                stream.tool_calls(index),
                reasoning=stream.reasoning(index),
            )
            for index in range(request.sampling.n)
        ]
        return Content(tuple(messages), tuple(answers))


def _edge_record(request: EdgeRequest, trace_id: str, total_ms: float) -> RequestRecord | EdgeRecord:
    gone, error = request.status is None, request.error
    status = DISCONNECTED if request.status is None else request.status
    details: dict[str, Any] = {name: getattr(request.caller, name, None) for name in ("tenant", "key_id")}
    if gone:
        details["error_code"] = "cancelled"
    elif error is not None:
        details |= {"error_code": error.code, "error_param": error.param, "error_message": error.message}
    if request.contract is None:
        return EdgeRecord(
            request.request_id, trace_id, request.method, request.path, status, total_ms, **details
        )
    return RequestRecord(
        request_id=request.request_id,
        generation_id="",
        trace_id=trace_id,
        contract=request.contract,
        status=status,
        total_ms=total_ms,
        finish_reason="replay" if request.replayed else "cancelled" if gone else "error",
        **details,
    )
