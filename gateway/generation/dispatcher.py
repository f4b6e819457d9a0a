"""Handing admitted work to a backend, guarded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from adapters.values import Adapter
from admission.controller import Slot
from budgeting.values import Plan
from gateway.backends.port import Backend, BackendState, Completion, DeltaSink, Restarting, Work
from gateway.contracts.values import Fallback, FinishReason, Usage
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.attempts import Attempts
from gateway.generation.job import Job
from gateway.generation.output_guard import OutputGuard
from gateway.generation.resume import Spelling, SplicedStream
from resilience.errors import DeadlinePassed
from resilience.events import ResilienceEvent, Resumed
from resilience.failures import BackendFailure, FailureKind
from resilience.guard import Attempt, Guard


@dataclass(frozen=True, slots=True)
class GenerationOutcome:
    """How the answer came to be: from which backend and prompt, how it ended, what was left out."""

    completion: Completion
    backend: str
    backend_name: str
    model: str
    plan: Plan
    adapter: Adapter | None = None
    fallback: Fallback | None = None
    warnings: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """``<base>+<adapter>``: which weights answered."""
        return f"{self.model}+{self.adapter.adapter_id}" if self.adapter else self.model


class Dispatcher:
    """Generates on a backend what admission has let through, from the start or behind what there is.

    Args:
        guard: makes the attempts.
        watch: looks at what comes of them.
        spelling: what token ids are text of.
        emit: takes each event; must not block.
    """

    def __init__(
        self, guard: Guard, watch: OutputGuard, spelling: Spelling, emit: Callable[[ResilienceEvent], None]
    ) -> None:
        self._guard = guard
        self._watch = watch
        self._spelling = spelling
        self._emit = emit

    def affords(self, backend: Backend, kind: FailureKind) -> bool:
        """Whether ``backend`` may be asked for an answer again after ``kind``; it is paid for when it may."""
        return self._guard.affords(backend.name, kind)

    async def generate(
        self, slot: Slot, backend: Backend, job: Job, stream: AnswerStream
    ) -> GenerationOutcome:
        """Generate on ``backend``; the slot is the permission to do so.

        What the stream has of an answer is gone on with where the backend can; else, unless the caller has a
        part of it, the answer is made anew. A deadline that passes after the first token ends the answer
        with what there is.

        Raises:
            BackendFailure: the backend failed and retrying on it did not help.
            DeadlinePassed: before the first token; a little before, where the degraded text may be given.
        """
        if backend.state is not BackendState.READY:
            slot.ignored()  # its state tells already; the circuit counts answers
            raise _not_ready(backend)
        stream.admitted(slot)
        attempts = Attempts(backend, job, stream, slot, self._spelling)
        given = stream.chars
        try:
            completion = await self._guard.run(
                lambda this: self._attempt(this, attempts, backend, stream),
                backend=backend.name,
                delivered=lambda: stream.committed and stream.chars > given,
                deadline=job.request.deadline,
                begun=lambda: stream.has_output,
                first_token_deadline=job.first_token_deadline,
            )
            slot.succeeded()
        except BackendFailure as failure:
            if not failure.counts:
                slot.ignored()  # it says nothing about the backend, or its state tells already
            raise
        except DeadlinePassed:
            slot.ignored()
            if not stream.has_output:
                raise
            return await cut_short(backend, job, stream, attempts.warnings)
        await stream.commit()
        return outcome_of(backend, job, stream, completion, attempts.warnings)

    async def _attempt(
        self, this: Attempt, attempts: Attempts, backend: Backend, stream: AnswerStream
    ) -> Completion:
        with stream.steps.step("attempt", backend.name, this.number) as step:
            attempts.step = step
            return await self._make(this, attempts, backend, stream)

    async def _make(
        self, this: Attempt, attempts: Attempts, backend: Backend, stream: AnswerStream
    ) -> Completion:
        work, going_on = await attempts.next(this)
        if going_on is None:
            again = this.number == 1
            return await self._generate(
                backend, work, stream.take, attempts, lambda: again and not stream.committed
            )
        rejoined, resumed = SplicedStream(stream, going_on.joint), stream.resumes[-1]
        if attempts.step is not None:
            attempts.step.mode = resumed.mode
        result = "cut"
        try:
            if work.sampling.max_tokens and work.sampling.max_tokens > 0:
                completion = await self._generate(backend, work, rejoined.take, attempts, lambda: False)
            else:  # it broke off behind its last token
                completion = Completion(
                    FinishReason.LENGTH, Usage(len(work.token_ids), 0, stream.cached_tokens)
                )
            await rejoined.end()
            result = "whole"
        except Exception:
            result = "broken"
            raise
        finally:
            self._emit(Resumed(resumed.source, resumed.target, resumed.mode, result, resumed.tokens))
        # What there was before this call, and what this call counted.
        output_tokens = resumed.tokens + completion.usage.output_tokens
        return replace(completion, usage=replace(completion.usage, output_tokens=output_tokens))

    async def _generate(
        self, backend: Backend, work: Work, out: DeltaSink, attempts: Attempts, again: Callable[[], bool]
    ) -> Completion:
        generating = self._watch.generate(backend, work, out, again=again, note=attempts.note)
        buffer = attempts.buffer
        if buffer is None or not buffer.holding:
            return await generating
        return await buffer.run(generating)


def outcome_of(
    backend: Backend, job: Job, stream: AnswerStream, completion: Completion, warnings: tuple[str, ...] = ()
) -> GenerationOutcome:
    """The outcome of a generation on ``backend``."""
    return GenerationOutcome(
        completion=completion,
        backend=backend.kind,
        backend_name=backend.name,
        model=backend.model,
        plan=stream.origin.plan if stream.origin is not None else job.plan,
        adapter=job.lease.adapter,
        warnings=warnings,
    )


async def cut_short(
    backend: Backend, job: Job, stream: AnswerStream, warnings: tuple[str, ...] = ()
) -> GenerationOutcome:
    """The outcome when the deadline has passed in the middle of an answer: what there is."""
    await stream.commit()
    plan = stream.origin.plan if stream.origin is not None else job.plan
    usage = Usage(len(plan.token_ids), stream.tokens, stream.cached_tokens)
    others = (FinishReason.DEADLINE,) * (job.request.sampling.n - 1)
    completion = Completion(FinishReason.DEADLINE, usage, stream.queue_wait_s, others)
    return outcome_of(backend, job, stream, completion, warnings)


def _not_ready(backend: Backend) -> BackendFailure:
    if backend.state is BackendState.DEAD:
        return BackendFailure(FailureKind.ENGINE_DEAD, f"{backend.name}: the engine has died")
    back_in_s = backend.ready_in_s if isinstance(backend, Restarting) else None
    return BackendFailure(
        FailureKind.BACKEND_UNAVAILABLE,
        f"{backend.name} is {backend.state.value}",
        retry_after_s=1.0 if back_in_s is None else max(1.0, back_in_s),
    )
