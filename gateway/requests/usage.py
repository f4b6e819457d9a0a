"""The usage row of a request: when its work starts, when it is answered, when it breaks off."""

from __future__ import annotations

from msgspec.structs import replace

from accounting.values import PartialUsage, UsageRow
from gateway.contracts.values import Answer
from gateway.errors import DeadlineExceeded, public_error
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.job import Job
from gateway.requests.timing import StageTimer


def opening_row(job: Job, revision: int, trace_id: str, unix_time: float) -> UsageRow:
    """The row before anything was generated."""
    request, target, adapter = job.request, job.target, job.lease.adapter
    return UsageRow(
        generation_id=request.generation_id,
        request_id=request.request_id,
        tenant=request.caller.tenant,
        key_id=request.caller.key_id,
        contract=request.contract.value,
        route=target.route.name,
        started_at=unix_time,
        org=request.caller.org,
        user_id=request.user,
        intent=request.intent,
        session_id=request.session_id,
        adapter_id=None if adapter is None else adapter.adapter_id,
        prompt_version=target.prompt_version,
        revision=revision,
        trace_id=trace_id,
    )


def closing_row(row: UsageRow, answer: Answer, *, model: str) -> UsageRow:
    """The row of a whole answer that ``model`` gave; a stored answer has no input tokens, and no model."""
    used, fallback = answer.usage, answer.fallback
    return replace(
        row,
        adapter_id=answer.adapter_id if used.input_tokens else row.adapter_id,
        backend=answer.backend,
        backend_name=answer.backend_name,
        backend_version=answer.backend_version,
        model=model if used.input_tokens else None,
        finish_reason=answer.finish_reason.value,
        fallback=fallback.kind if fallback else None,
        fallback_reason=fallback.reason if fallback else None,
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


def partial_usage(
    row: UsageRow, job: Job, stream: AnswerStream, timer: StageTimer, error: BaseException
) -> PartialUsage:
    """What was used until ``error`` ended the request, and whether the caller has a part of the answer."""
    if isinstance(error, Exception):
        code = public_error(error).code
    else:
        code = DeadlineExceeded.code if timer.timed_out else "cancelled"
    origin = stream.origin
    used = replace(
        row,
        backend_name=origin.backend if origin else None,
        model=origin.model if origin else None,
        error_code=code,
        input_tokens=job.plan.counts.total if stream.started_at is not None else 0,
        output_tokens=stream.tokens,
        cached_tokens=stream.cached_tokens,
        queue_wait_ms=stream.total_wait_s * 1000,
        ttft_ms=timer.at_ms(stream.first_at),
        total_ms=timer.total_ms(),
    )
    return PartialUsage(used, stream.committed)
