"""Makes the caller's answer from the generated output, and its usage row."""

from collections.abc import Callable

from msgspec.structs import replace

from accounting.values import PartialUsage, UsageRow
from adapters.selection import Lease
from budgeting.values import SectionCounts
from gateway.backends.port import Backend
from gateway.contracts.answer import Answer, BudgetReport, Choice, Timings
from gateway.contracts.values import Contract, GenerateRequest
from gateway.errors import DeadlineExceeded, public_error
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.dispatcher import GenerationOutcome
from gateway.generation.job import Job
from gateway.prompts.canonical import Canonical
from gateway.requests.timing import StageTimer


def respond(
    request: GenerateRequest,
    outcome: GenerationOutcome,
    stream: AnswerStream,
    timer: StageTimer,
    *,
    trace_id: str,
    warnings: tuple[str, ...],
) -> Answer:
    completion, usage, plan = outcome.completion, outcome.completion.usage, outcome.plan
    if stream.reasoning_tokens and not usage.reasoning_tokens:
        usage = replace(usage, reasoning_tokens=min(stream.reasoning_tokens, usage.output_tokens))
    adapter_id = outcome.adapter.adapter_id if outcome.adapter else None
    generated = usage.input_tokens > 0
    # If the cache or the degraded text answered, no prompt was sent, so its counts are 0.
    counts = plan.counts if generated else SectionCounts()
    with_logprobs = generated and request.sampling.logprobs is not None
    ttft_ms = timer.at_ms(stream.first_at)
    answer = Answer(
        request.request_id,
        request.generation_id,
        outcome.backend,
        outcome.backend_name,
        # The weights that answered: ``<base>+<adapter>``, or the base model.
        f"{outcome.model}+{adapter_id}" if adapter_id else outcome.model,
        adapter_id or outcome.model,
        trace_id,
        stream.text(),
        completion.finish_reason,
        usage,  # with more keywords the call would build a dict
        stop_sequence=completion.stop_sequence,
        context_full=completion.context_full,
        timings=Timings(
            # ``round`` takes ten times as long.
            queue_wait_ms=((stream.admission_wait_s + completion.queue_wait_s) * 1_000_000 + 0.5) // 1 / 1000,
            ttft_ms=None if ttft_ms is None else (ttft_ms * 1000 + 0.5) // 1 / 1000,
            total_ms=(timer.total_ms() * 1000 + 0.5) // 1 / 1000,
        ),
        budget=BudgetReport(
            system=counts.system,
            retrieval=counts.retrieval,
            recent_turns=counts.recent_turns,
            older_summary=counts.older_summary,
            tools=counts.tools,
            generation_reserve=plan.generation_reserve,
            dropped_chunks=plan.dropped_chunks,
            dropped_turns=plan.dropped_turns,
            cut_chunks=plan.cut_chunks,
            merged_chunks=plan.merged_chunks,
            summarized_turns=plan.summarized_turns,
        ),
        created=request.created,
        fallback=outcome.fallback,
        warnings=(*outcome.warnings, *warnings),
        reasoning=stream.reasoning(),
        tool_calls=stream.tool_calls(),
        adapter_id=adapter_id,
    )
    if not (with_logprobs or completion.others or stream.events is not None):
        return answer
    return replace(
        answer,
        logprobs=(with_logprobs and stream.logprobs()) or None,
        others=tuple(
            Choice(
                stream.text(index),
                reason,
                (with_logprobs and stream.logprobs(index)) or None,
                stream.reasoning(index),
                stream.tool_calls(index),
            )
            for index, reason in enumerate(completion.others, 1)
        ),
        events=() if stream.events is None else stream.events.in_order(),
    )


def opening_row(job: Job, revision: int, trace_id: str, unix_time: float) -> UsageRow:
    """Return the usage row before anything was generated."""
    request, target = job.request, job.target
    return UsageRow(
        request.generation_id,
        request.request_id,  # 16 keywords make a call build a dict
        tenant=request.caller.tenant,
        key_id=request.caller.key_id,
        contract=request.contract._value_,  # the property costs two calls
        route=target.route.name,
        started_at=unix_time,
        kind="front" if request.caller.by_front else "request",
        org=request.caller.org,
        user_id=request.user,
        intent=request.intent,
        session_id=request.session_id,
        adapter_id=job.lease.adapter_id,
        prompt_version=target.prompt_version,
        revision=revision,
        trace_id=trace_id,
    )


def estimated_cost(
    row: UsageRow,
    backend: Backend,
    input_tokens: int,
    output_tokens: int,
    price: Callable[[UsageRow], UsageRow],
) -> int:
    """Return the cost of a generation of so many tokens in nano US dollars; 0 without a price."""
    used = replace(
        row,
        backend_name=backend.name,
        model=backend.model,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cache_write_tokens=input_tokens,  # the dearest case
    )
    return price(used).cost_nanousd


def partial_usage(
    row: UsageRow, stream: AnswerStream, timer: StageTimer, error: BaseException
) -> PartialUsage:
    """Return the usage until ``error`` ended the request, and whether the caller has a part of the answer."""
    if isinstance(error, Exception):
        code = public_error(error).code
    else:
        code = DeadlineExceeded.code if timer.limit.expired else "cancelled"
    origin = stream.origin
    used = replace(
        row,
        adapter_id=None if origin and origin.served_model == origin.model else row.adapter_id,
        backend_name=origin.backend if origin else None,
        model=origin.model if origin else None,
        error_code=code,
        input_tokens=stream.input_tokens,
        output_tokens=stream.tokens,
        cached_tokens=stream.cached_tokens,
        reasoning_tokens=stream.reasoning_tokens,
        tool_calls=stream.call_count,
        queue_wait_ms=stream.total_wait_s * 1000,
        ttft_ms=timer.at_ms(stream.first_at),
        total_ms=timer.total_ms(),
    )
    # A time limit ends the answer for good, although it cancels the task as the end of the gateway does.
    return PartialUsage(used, stream.committed if timer.limit.expired else stream.delivered)


def closing_row(row: UsageRow, answer: Answer, *, model: str) -> UsageRow:
    """Return the row of a complete answer of ``model``; a stored answer has no input tokens and no model."""
    used, fallback = answer.usage, answer.fallback
    if fallback is not None:
        row = replace(row, fallback=fallback.kind, fallback_reason=fallback.reason)
    if used.cache_write_tokens:  # apart, since a call with more keywords builds a dict
        row = replace(row, cache_write_tokens=used.cache_write_tokens)
    return replace(
        row,
        adapter_id=answer.adapter_id if used.input_tokens else row.adapter_id,
        backend=answer.backend,
        backend_name=answer.backend_name,
        backend_version=answer.backend_version,
        model=model if used.input_tokens else None,
        finish_reason=answer.finish_reason._value_,
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        cached_tokens=used.cached_tokens,
        reasoning_tokens=used.reasoning_tokens,
        tool_calls=sum(map(len, (answer.tool_calls, *(one.tool_calls for one in answer.others))))
        if answer.others
        else len(answer.tool_calls),
        queue_wait_ms=answer.timings.queue_wait_ms,
        ttft_ms=answer.timings.ttft_ms,
        total_ms=answer.timings.total_ms,
    ).delivered()


def warnings_of(request: GenerateRequest, canonical: Canonical, lease: Lease) -> tuple[str, ...]:
    """Return warnings about volatile content, and about an adapter of a routing rule that is not served."""
    warnings = []
    if lease.missing is not None:
        warnings.append(f"adapter {lease.missing} could not be used (not served); the base model answered")
    if canonical.findings:
        field = "context" if request.contract is Contract.NATIVE else "sluice.context"
        effect = "was moved behind" if canonical.moved else "shortens"
        warnings.append(
            f"volatile content in system messages ({', '.join(canonical.kinds)}) {effect} the prefix that"
            f" requests share; send it in {field}"
        )
    return tuple(warnings)
