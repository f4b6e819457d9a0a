"""Gives admitted work to a backend, with retries and an inspection of the output."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from adapters.values import Adapter
from admission.queue import Slot
from budgeting.plan import INLINE_CHARS
from budgeting.values import Plan, ToolChoice
from gateway.backends.port import READY, Backend, BackendState, Completion, DeltaSink, Work, restarting
from gateway.contracts.answer import Fallback
from gateway.contracts.values import FinishReason, Usage
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.attempts import Attempts
from gateway.generation.job import Job
from gateway.generation.output_guard import OutputGuard
from gateway.generation.resume import SplicedStream
from gateway.generation.retry_loop import AttemptBounds, RetryLoop
from gateway.generation.tool_calls import TOOL_CALLS, WHOLE_REASONS, CallOutcome, fault_of, outcomes_of
from resilience.errors import DeadlinePassed
from resilience.events import ResilienceEvent, Resumed
from resilience.failures import BackendFailure, FailureKind
from resilience.resume import Resumption, Spelling
from resilience.retry import Attempt


class GenerationOutcome(Struct, frozen=True):
    """The result of a generation: backend, prompt, completion, fallback and warnings."""

    completion: Completion
    backend: str
    backend_name: str
    model: str
    plan: Plan
    adapter: Adapter | None = None
    fallback: Fallback | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Generates an admitted request's answer on a backend: the whole one, or the rest of a partial one.

    ``spelling`` returns the tokenizer of a model.
    """

    retries: RetryLoop
    _output_guard: OutputGuard
    _spelling: Callable[[str], Spelling]
    _emit: Callable[[ResilienceEvent], None]

    async def generate(
        self, slot: Slot, backend: Backend, job: Job, stream: AnswerStream
    ) -> GenerationOutcome:
        """Generate on ``backend`` with the permission ``slot``.

        A partial answer in ``stream`` is resumed if the backend can; else, unless the caller has a part of
        it, a new answer is generated. If the deadline passes after the first token, the answer ends there.

        Raises:
            BackendFailure: the backend failed, and retries on it did not help.
            DeadlinePassed: before the first token; somewhat earlier if the degraded text may be served.
        """
        if backend.state is not READY:
            slot.ignored()  # the circuit breaker counts only answers; the state is known
            raise _not_ready(backend)
        stream.admission_wait_s += slot.waited_s
        attempts = Attempts(backend, job, stream, slot, self._spelling)
        chars, deadline = stream.chars, job.deadline
        bounds = AttemptBounds(
            backend.name,
            job.call_budget,
            delivered=lambda: stream.committed and stream.chars > chars,
            begun=lambda: stream.has_output,
            deadline=deadline,
            first_token_deadline=deadline - job.fallback_reserve_s,
            has_others=lambda: job.has_fallback_beside(backend.name),
        )
        try:
            completion = await self.retries.run(partial(self._attempt, attempts), bounds)
            slot.succeeded(completion.usage.cached_tokens)
        except BackendFailure as failure:
            if not failure.counts:
                slot.ignored()  # the failure is not the backend's, or the backend's state already shows it
            raise
        except DeadlinePassed:
            slot.ignored()
            if not stream.has_output:
                raise
            return await cut_short(backend, job, stream, attempts.notes)
        await stream.commit()
        if stream.resumes:
            completion = replace(completion, usage=stream.used(completion.usage))
        return outcome_of(backend, job, stream, completion, attempts.notes)

    async def _attempt(self, attempts: Attempts, this: Attempt) -> Completion:
        backend, stream = attempts.backend, attempts.stream
        with stream.steps.step("attempt", backend.name, this.number) as step:
            attempts.step = step
            work, resumption = await attempts.next(this)
            may_retry = this.number == 1 and resumption is None
            if resumption is not None:
                completion = await self._resume(attempts, work, resumption)
            else:
                completion = await self._generate(
                    attempts, work, stream.take, lambda: may_retry and not stream.committed
                )
            attempts.notes.extend(completion.warnings)
            reasons = [completion.finish_reason, *completion.others]
            if work.tool_choice is not None and _lacks_call(work.tool_choice, reasons, stream):
                call = "a tool call" if (name := work.tool_choice.name) is None else f"a call of {name}"
                attempts.notes.append(f"tool_choice requires {call}, and the model made none")
            if stream.events is None and TOOL_CALLS not in reasons:
                return completion
            return await _checked(completion, reasons, work, attempts, may_retry=may_retry)

    async def _resume(self, attempts: Attempts, work: Work, resumption: Resumption) -> Completion:
        stream = attempts.stream
        spliced, resume = SplicedStream(stream, resumption.splice), stream.resumes[-1]
        if attempts.step is not None:
            attempts.step.mode = resume.mode
        result = "cut"
        try:
            if work.sampling.max_tokens and work.sampling.max_tokens > 0:
                completion = await self._generate(attempts, work, spliced.take, lambda: False)
                await spliced.end()
            else:  # the stream broke after the answer's last token
                completion = Completion(
                    FinishReason.LENGTH, Usage(work.input_tokens, 0, stream.cached_tokens)
                )
                if stream.events is None:
                    await spliced.end()
            result = "whole"
        except Exception:
            result = "broken"
            stream.resume_failed()
            raise
        finally:
            self._emit(Resumed(resume.source, resume.target, resume.mode, result, resume.tokens))
        # The tokens before this call plus those of this call.
        output_tokens = resume.tokens + completion.usage.output_tokens
        usage = replace(completion.usage, output_tokens=output_tokens)
        return replace(completion, usage=usage)

    def _generate(
        self, attempts: Attempts, work: Work, out: DeltaSink, may_retry: Callable[[], bool]
    ) -> Awaitable[Completion]:
        generating = self._output_guard.generate(
            attempts.backend, work, attempts.stream, out, may_retry=may_retry, note=attempts.notes.append
        )
        buffer = attempts.stream.buffer
        return generating if buffer is None or not buffer.holding else buffer.run(generating)


def _lacks_call(choice: ToolChoice, reasons: Sequence[FinishReason], stream: AnswerStream) -> bool:
    """Whether a choice ended without the call that it must have: some servers only ask the model for it."""
    return choice.forces_call and any(
        reason in WHOLE_REASONS
        and not any(choice.name in (None, call.name) for call in stream.tool_calls(index))
        for index, reason in enumerate(reasons)
    )


async def _checked(
    completion: Completion, reasons: list[FinishReason], work: Work, attempts: Attempts, *, may_retry: bool
) -> Completion:
    """Check the tool calls of an answer; the completion of a choice with a faulty call ends with an error.

    If a stop string may have ended the answer, a last call that is not JSON counts as cut, and its choice
    ends with the reason ``length``.

    ``may_retry``: the answer may be generated again if the caller has no part of it.

    Raises BackendFailure: ``degenerate_output`` for a faulty call if the answer is generated again;
    ``stream_broken`` if the finish reasons contradict the events.
    """
    stream = attempts.stream
    # A greedy request would generate the same again.
    may_retry = may_retry and not stream.committed and work.sampling.temperature != 0.0
    found: list[CallOutcome] = []
    tools = stream.origin.plan.tools if stream.origin is not None else ()
    for index, reason in enumerate(reasons):
        calls = stream.tool_calls(index)
        check = partial(outcomes_of, calls, tools, reason, in_call=stream.in_call(index))
        # A new schema of 1 KB takes 0.1 s to read, one of 64 KB seconds.
        long = sum(len(call.arguments) for call in calls) > INLINE_CHARS or any(one.strict for one in tools)
        outcomes = await asyncio.to_thread(check) if long else check()
        maybe_stopped = work.sampling.stop and reason in WHOLE_REASONS
        if maybe_stopped and outcomes and outcomes[-1] is CallOutcome.NOT_JSON:
            outcomes[-1], reasons[index] = CallOutcome.CUT, FinishReason.LENGTH
        fault = fault_of(calls, outcomes)
        if fault is not None and may_retry:
            stream.call_outcomes[CallOutcome.RETRIED] += len(calls)
            raise BackendFailure(FailureKind.DEGENERATE_OUTPUT, fault)
        found += outcomes
        if fault is not None and reasons[index] in WHOLE_REASONS:
            reasons[index] = FinishReason.ERROR
            attempts.notes.append(f"choice {index} ended with an error: {fault}" if index else fault)
    stream.end(reasons)
    for outcome in found:
        stream.call_outcomes[outcome] += 1
    known = {tool.name for tool in work.tools}
    called = [call.name for index in range(len(reasons)) for call in stream.tool_calls(index)]
    attempts.notes += [
        f"the model called {name}, which is not in tools" for name in called if name not in known
    ]
    first, *others = reasons
    stop = completion.stop_sequence if first in WHOLE_REASONS else None
    return replace(completion, finish_reason=first, others=tuple(others), stop_sequence=stop)


def outcome_of(
    backend: Backend, job: Job, stream: AnswerStream, completion: Completion, warnings: Iterable[str]
) -> GenerationOutcome:
    return GenerationOutcome(
        completion=completion,
        backend=backend.kind,
        backend_name=backend.name,
        model=backend.model,
        plan=stream.origin.plan if stream.origin is not None else job.plan,
        adapter=job.lease.adapter,
        warnings=tuple(dict.fromkeys(warnings)) if warnings else (),
    )


async def cut_short(
    backend: Backend, job: Job, stream: AnswerStream, warnings: Iterable[str] = ()
) -> GenerationOutcome:
    """Return the partial answer as the outcome, after the deadline has passed in the middle of an answer."""
    await stream.commit()
    plan = stream.origin.plan if stream.origin is not None else job.plan
    usage = Usage(plan.counts.total, stream.tokens, stream.cached_tokens)
    others = (FinishReason.DEADLINE,) * (job.request.sampling.n - 1)
    completion = Completion(FinishReason.DEADLINE, usage, stream.queue_wait_s, others)
    return outcome_of(backend, job, stream, completion, warnings)


def _not_ready(backend: Backend) -> BackendFailure:
    if backend.state is BackendState.DEAD:
        return BackendFailure(FailureKind.ENGINE_DEAD, f"{backend.name}: the engine has died")
    back_in_s, reason = None, f"{backend.name} is {backend.state.value}"
    if backend.state is BackendState.STARTING and (engine := restarting(backend)) is not None:
        absence = engine.absence
        back_in_s, reason = absence.retry_s or engine.ready_in_s, absence.reason
    return BackendFailure(
        FailureKind.BACKEND_UNAVAILABLE,
        reason,
        retry_after_s=1.0 if back_in_s is None else max(1.0, back_in_s),
    )
