"""The values a request ends in: the caller's answer, its timings, the first form of its usage row."""

from __future__ import annotations

from accounting.values import UsageRow
from gateway.contracts.values import (
    Answer,
    BudgetReport,
    Choice,
    GenerateRequest,
    Timings,
)
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.dispatcher import GenerationOutcome
from gateway.requests.request_record import RequestRecorder


def respond(
    request: GenerateRequest, outcome: GenerationOutcome, trip: RequestRecorder, *, now: float
) -> Answer:
    """The backend-neutral answer."""
    stream = trip.stream
    waited_s = trip.timer.stage_ms.get("admit", 0.0) / 1000 + outcome.completion.queue_wait_s
    usage, plan = outcome.completion.usage, outcome.plan
    counts = plan.counts
    generated = usage.input_tokens > 0
    told = generated and request.sampling.logprobs is not None
    return Answer(
        request_id=request.request_id,
        generation_id=request.generation_id,
        backend=outcome.backend,
        backend_name=outcome.backend_name,
        backend_version=outcome.version,
        model=request.model or outcome.model,
        trace_id=trip.trace_id,
        output_text=stream.text(),
        finish_reason=outcome.completion.finish_reason,
        usage=usage,
        timings=timings(request, stream, now, queue_wait_s=waited_s),
        # Nothing was sent when the cache or the degraded text answered: the counts say what was sent.
        budget=BudgetReport(
            system=counts.system if generated else 0,
            retrieval=counts.retrieval if generated else 0,
            recent_turns=counts.recent_turns if generated else 0,
            older_summary=counts.older_summary if generated else 0,
            generation_reserve=plan.generation_reserve,
            dropped_chunks=plan.dropped_chunks,
            dropped_turns=plan.dropped_turns,
            cut_chunks=plan.cut_chunks,
            merged_chunks=plan.merged_chunks,
            summarized_turns=plan.summarized_turns,
        ),
        created=request.created,
        fallback=outcome.fallback,
        warnings=(*outcome.warnings, *trip.warnings),
        logprobs=stream.logprobs() if told else None,
        others=tuple(
            Choice(stream.text(index), reason, stream.logprobs(index) if told else None)
            for index, reason in enumerate(outcome.completion.others, 1)
        ),
        adapter_id=outcome.adapter.adapter_id if outcome.adapter else None,
    )


def timings(request: GenerateRequest, stream: AnswerStream, now: float, *, queue_wait_s: float) -> Timings:
    """Milliseconds since arrival."""
    first = stream.first_at
    return Timings(
        queue_wait_ms=round(queue_wait_s * 1000, 3),
        ttft_ms=None if first is None else round((first - request.arrived_at) * 1000, 3),
        total_ms=round((now - request.arrived_at) * 1000, 3),
    )


def opening_row(request: GenerateRequest, trip: RequestRecorder, *, unix_time: float) -> UsageRow:
    """The usage row as it stands before anything was generated."""
    target, lease = trip.target, trip.lease
    return UsageRow(
        generation_id=request.generation_id,
        request_id=request.request_id,
        tenant=request.caller.tenant,
        key_id=request.caller.key_id,
        contract=request.contract.value,
        route=target.route.name if target else "",
        started_at=unix_time,
        org=request.caller.org,
        user_id=request.user,
        intent=request.intent,
        session_id=request.session_id,
        adapter_id=lease.adapter.adapter_id if lease and lease.adapter else None,
        prompt_version=target.prompt_version if target else None,
        revision=trip.revision.number if trip.revision else None,
        trace_id=trip.trace_id,
    )
