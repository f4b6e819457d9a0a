"""The usage row of a request before its work, and what was used of it when the work breaks off."""

from __future__ import annotations

from msgspec.structs import replace

from accounting.values import PartialUsage, UsageRow
from gateway.errors import DeadlineExceeded, public_error
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.job import Job
from gateway.requests.timing import StageTimer


def opening_row(job: Job, revision: int, trace_id: str, unix_time: float) -> UsageRow:
    """The row before anything was generated."""
    request, target = job.request, job.target
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
        adapter_id=job.lease.adapter_id,
        prompt_version=target.prompt_version,
        revision=revision,
        trace_id=trace_id,
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
