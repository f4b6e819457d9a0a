"""What is kept of a request for its account, its trace, its metrics and its log line.

The notes are written by the journey and read by nobody on it: no stage decides by them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from accounting.account import Account
from accounting.values import UsageRow
from adapters.registry import Lease
from budgeting.values import Plan
from gateway.backends.port import Backend
from gateway.contracts.values import Answer, Contract, GenerateRequest
from gateway.errors import DeadlineExceeded, PublicError, public_error
from gateway.generation.answer_stream import AnswerStream
from gateway.prompts.canonical import Canonical
from gateway.prompts.prefixes import Prefix, PrefixWatch
from gateway.requests.answer_checks import AnswerCheck, in_shape
from gateway.requests.in_flight import StageTimer
from gateway.routing.rank import Ranking
from gateway.routing.revision import Revision
from gateway.routing.target import Target
from observability.events import RequestRecord, ResumeFact
from observability.trace_facts import Content, TraceFacts
from observability.tracing import RootSpan, Tracing

# The status that is logged when the caller left before the end (nginx's convention).
CLIENT_CLOSED_REQUEST = 499
# Stages whose time is not the gateway's own: waiting for a slot, and the backend.
_NOT_OURS = frozenset({"admit", "generate"})


@dataclass(slots=True)
class RequestRecorder:
    """The running notes of one request."""

    request: GenerateRequest
    stream: AnswerStream
    timer: StageTimer
    span: RootSpan
    clock: Callable[[], float]
    prefixes: PrefixWatch
    target: Target | None = None
    revision: Revision | None = None
    canonical: Canonical | None = None
    plan: Plan | None = None
    prefix: Prefix | None = None
    lease: Lease | None = None
    answer: Answer | None = None
    status: int = 200
    error_code: str | None = None
    finish_reason: str | None = None
    drawn: str | None = None
    passed: bool | None = None
    check: AnswerCheck = in_shape
    limit: asyncio.Timeout | None = None
    account: Account | None = None

    @property
    def late(self) -> bool:
        """Whether it is being cut off, or was, because it took too long."""
        return self.limit is not None and self.limit.expired()

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return self.span.trace_id

    def found(self, target: Target, revision: Revision) -> None:
        """Where the request goes is known."""
        self.target, self.revision = target, revision

    def canonicalized(self, canonical: Canonical) -> None:
        """The prompt is in canonical order."""
        self.canonical = canonical

    def planned(self, plan: Plan) -> None:
        """What is sent is known."""
        self.plan = plan

    def leased(self, lease: Lease) -> None:
        """Which adapter serves it is known."""
        self.lease = lease

    def drew(self, ranking: Ranking) -> None:
        """Whom the weights gave it is known."""
        self.drawn = ranking.drawn

    def bound(self, backend: Backend) -> None:
        """Where it is meant to be generated is known, and with it what that cache should find."""
        if self.plan is not None:
            adapter = self.lease.adapter if self.lease else None
            self.prefix = self.prefixes.expect(
                self.plan,
                backend,
                tenant=self.request.caller.tenant,
                adapter_id=adapter.adapter_id if adapter else None,
            )

    def answered(self, answer: Answer) -> None:
        """The answer is whole."""
        self.answer = answer
        self.passed = self.check(self.request, answer)
        if self.prefix is not None and self.prefix.backend == answer.backend_name:
            self.prefixes.computed(self.prefix)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the caller should know of the prompt, and of an adapter that a rule names in vain."""
        missing = self.lease.missing if self.lease else None
        told = (
            ()
            if missing is None
            else (f"adapter {missing} could not be used (not served); the base model answered",)
        )
        if self.canonical is None or not self.canonical.findings:
            return told
        kinds = ", ".join(self.canonical.kinds)
        place = "context" if self.request.contract is Contract.NATIVE else "sluice.context"
        done = "was moved behind" if self.canonical.moved else "shortens"
        return (
            *told,
            f"volatile content in system messages ({kinds}) {done} the prefix that requests share; "
            f"send it in {place}",
        )

    def failed(self, error: PublicError) -> None:
        """The request ended in an error."""
        self.status = 200 if self.stream.committed else error.status
        self.error_code, self.finish_reason = error.code, "error"

    def cancelled(self) -> None:
        """The caller left, or the gateway stopped."""
        self.status, self.error_code, self.finish_reason = CLIENT_CLOSED_REQUEST, "cancelled", "cancelled"

    @contextmanager
    def billing(self, account: Account, row: UsageRow) -> Iterator[None]:
        """Whatever breaks the request off, bill what was delivered up to then."""
        self.account = account
        try:
            yield
        except BaseException as error:
            if account.settled:
                raise
            origin, started = self.stream.origin, self.stream.started_at is not None
            broken = replace(
                row,
                backend_name=origin.backend if origin else None,
                model=origin.model if origin else None,
                error_code=self._code(error),
                input_tokens=self.plan.counts.total if self.plan and started else 0,
                output_tokens=self.stream.tokens,
                cached_tokens=self.stream.cached_tokens,
                queue_wait_ms=self.stream.queue_wait_s * 1000,
                ttft_ms=self._since_arrival(self.stream.first_at),
                total_ms=self._since_arrival(self.clock()) or 0.0,
            )
            # Who got a part pays for it; who got nothing does not.
            account.update(broken.delivered() if self.stream.committed else broken)
            raise

    def _code(self, error: BaseException) -> str:
        if isinstance(error, Exception):
            return public_error(error).code
        return DeadlineExceeded.code if self.late else "cancelled"

    def record(self) -> RequestRecord:
        """Everything, once the request has ended."""
        request, answer, target, stage_ms = self.request, self.answer, self.target, self.timer.stage_ms
        total_ms = self._since_arrival(self.clock()) or 0.0
        fallback = answer.fallback if answer else None
        waited = self.stream.started_at is not None
        return RequestRecord(
            request_id=request.request_id,
            generation_id=request.generation_id,
            trace_id=self.trace_id,
            tenant=request.caller.tenant,
            contract=request.contract.value,
            status=self.status,
            total_ms=total_ms,
            route=target.route.name if target else None,
            model=answer.model if answer else request.model,
            intent=request.intent,
            locale=request.locale,
            adapter_id=self._adapter_id(),
            adapter_rule=self.lease.rule if self.lease else None,
            prompt_version=target.prompt_version if target else None,
            revision=self.revision.number if self.revision else None,
            backend=answer.backend if answer else None,
            backend_name=answer.backend_name if answer else None,
            backend_version=answer.backend_version if answer else None,
            error_code=self.error_code,
            finish_reason=answer.finish_reason.value if answer else self.finish_reason,
            fallback_kind=fallback.kind if fallback else None,
            fallback_reason=fallback.reason if fallback else None,
            input_tokens=answer.usage.input_tokens if answer else 0,
            output_tokens=answer.usage.output_tokens if answer else self.stream.tokens,
            cached_tokens=answer.usage.cached_tokens if answer else self.stream.cached_tokens,
            queue_wait_ms=(answer.timings.queue_wait_ms if answer else self.stream.queue_wait_s * 1000)
            if waited
            else None,
            ttft_ms=self._since_arrival(self.stream.first_at),
            generation_ms=stage_ms.get("generate"),
            overhead_ms=sum(ms for stage, ms in stage_ms.items() if stage not in _NOT_OURS),
            stage_ms=stage_ms,
            dropped_chunks=len(self.plan.dropped_chunks) if self.plan else 0,
            dropped_turns=self.plan.dropped_turns if self.plan else 0,
            cut_chunks=len(self.plan.cut_chunks) if self.plan else 0,
            merged_chunks=len(self.plan.merged_chunks) if self.plan else 0,
            summarized_turns=self.plan.summarized_turns if self.plan else 0,
            seams=self._seams(),
            **self._prefix_facts(),
            stream=request.stream,
            priority=request.priority,
            drawn=self.drawn,
            passed=self.passed,
            session=None if request.session_id is None else hash((request.caller.tenant, request.session_id)),
            cost_nanousd=self._cost_nanousd(),
        )

    def facts(self) -> TraceFacts:
        """What the trace tells beside the record; asked for once, when the trace is kept."""
        asked, steps = self.request.sampling, self.stream.steps.facts(self.request.arrived_at)
        refused = next((step.failure for step in steps if step.name == "refused"), None)
        admitted = "admit" in self.timer.stage_ms or any(step.name == "attempt" for step in steps)
        decision = "admitted" if admitted else None
        if refused is not None and "admit" not in self.timer.stage_ms:
            decision = "refused"
        elif self.stream.steps.shortened:
            decision = "shortened"
        return TraceFacts(
            steps=steps,
            admission=decision,
            admission_reason=refused if decision == "refused" else None,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            seed=asked.seed,
            choices=asked.n,
            content=self._content() if self.target and self.target.route.record_content else None,
        )

    def _content(self) -> Content:
        request = self.request
        messages = tuple((message.role.value, message.content) for message in request.messages)
        if request.raw_prompt is not None:
            raw = request.raw_prompt
            messages = (("user", raw if isinstance(raw, str) else f"{len(raw)} token ids"),)
        return Content(messages, self.stream.text())

    @property
    def slow(self) -> bool:
        """Whether it took longer than the route's targets."""
        if self.target is None:
            return False
        route, first = self.target.route, self._since_arrival(self.stream.first_at)
        return (first or 0.0) > route.ttft_slo_ms or (
            self._since_arrival(self.clock()) or 0.0
        ) > route.total_slo_ms

    def _seams(self) -> tuple[ResumeFact, ...] | None:
        if not self.stream.resumes:
            return None
        return tuple(
            ResumeFact(
                (one.at_s - self.request.arrived_at) * 1000, one.source, one.target, one.mode, one.tokens
            )
            for one in self.stream.resumes
        )

    def _prefix_facts(self) -> dict[str, Any]:
        """The record's fields about the stable prefix; what the cache did is told where it was asked."""
        facts: dict[str, Any] = {}
        if self.canonical is not None and self.canonical.findings:
            facts["volatile"] = self.canonical.kinds
            facts["volatile_action"] = "moved" if self.canonical.moved else "reported"
        prefix, answer = self.prefix, self.answer
        if prefix is not None and prefix.fingerprint is not None:
            facts["prefix_fingerprint"] = prefix.fingerprint
            if answer is not None and answer.backend_name == prefix.backend:
                facts["prefix_tokens"] = prefix.tokens
                facts["prefix_expected_tokens"] = prefix.expected
                facts["prefix_cached_tokens"] = min(answer.usage.cached_tokens, prefix.tokens)
        return facts

    def _cost_nanousd(self) -> int | None:
        if self.account is None or self.account.row.price_version is None:
            return None
        return self.account.row.cost_nanousd

    def _adapter_id(self) -> str | None:
        """Who answered; who was asked, as long as no model has."""
        if self.answer is not None and self.answer.usage.input_tokens:
            return self.answer.adapter_id
        adapter = self.lease.adapter if self.lease else None
        return adapter.adapter_id if adapter else None

    def _since_arrival(self, at: float | None) -> float | None:
        return None if at is None else (at - self.request.arrived_at) * 1000


def closing_row(row: UsageRow, answer: Answer, *, model: str | None = None) -> UsageRow:
    """The usage row of a whole answer that ``model`` gave."""
    used = answer.usage
    return replace(
        row,
        adapter_id=answer.adapter_id if answer.usage.input_tokens else row.adapter_id,
        backend=answer.backend,
        backend_name=answer.backend_name,
        backend_version=answer.backend_version,
        model=model if answer.usage.input_tokens else None,
        finish_reason=answer.finish_reason.value,
        fallback=answer.fallback.kind if answer.fallback else None,
        fallback_reason=answer.fallback.reason if answer.fallback else None,
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        cached_tokens=used.cached_tokens,
        billable_input_tokens=used.input_tokens,
        billable_output_tokens=used.output_tokens,
        billable_cached_tokens=used.cached_tokens,
        queue_wait_ms=answer.timings.queue_wait_ms,
        ttft_ms=answer.timings.ttft_ms,
        total_ms=answer.timings.total_ms,
    )


@dataclass(frozen=True, slots=True)
class Reporter:
    """Opens the notes of a request and, at its end, hands the record on."""

    tracer: Tracing
    emit: Callable[[RequestRecord], None]
    log_defect: Callable[[str, BaseException], None]
    clock: Callable[[], float]
    prefixes: PrefixWatch
    check: AnswerCheck = in_shape

    def begin(self, request: GenerateRequest, stream: AnswerStream, timer: StageTimer) -> RequestRecorder:
        """Open the notes and the root span."""
        span = self.tracer.begin(
            request.trace_parent,
            trace_id=request.trace_id,
            trace_state=request.trace_state,
            ago_s=self.clock() - request.arrived_at,
        )
        stream.steps.root = span
        return RequestRecorder(
            request,
            stream,
            timer,
            span,
            self.clock,
            self.prefixes,
            check=self.check,
        )

    def defect(self, trip: RequestRecorder, error: BaseException) -> None:
        """An error that is nobody's but ours: keep its traceback for the operator."""
        self.log_defect(trip.request.request_id, error)

    def end(self, trip: RequestRecorder) -> None:
        """Close the span and hand the record on."""
        record = trip.record()
        self.tracer.finish(trip.span, record, trip.facts, slow=self.tracer.exporting and trip.slow)
        self.emit(record)
