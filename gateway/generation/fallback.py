"""After a failure: go on with the answer, or give a gentler one by the route's fallback chain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from adapters.events import AdapterReplacedByBase
from admission.controller import AdmissionController
from admission.errors import Refused
from admission.values import Demand, Reason
from gateway.backends.port import Backend, BackendState, Completion, Delta, Restarting
from gateway.contracts.values import Answer, Fallback, FinishReason, Usage
from gateway.generation.answer_cache import AnswerCache, Found
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.demand import demand_of, readmission_demand
from gateway.generation.dispatcher import Dispatcher, GenerationOutcome, cut_short
from gateway.generation.fallback_policy import FallbackPolicy, Situation, TryBackend, WaitForRestart
from gateway.generation.job import Job
from gateway.generation.resume import Mode, mode_on
from gateway.generation.without_adapter import warning_of, without_adapter
from gateway.routing.revision import DEGRADED, RESPONSE_CACHE
from resilience.errors import DeadlinePassed
from resilience.failures import BackendFailure, FailureKind
from resilience.leg_limits import LegLimits, LegUsage, Permit

# Requests that wait for an engine to come back. Each holds its prompt and a connection; the next one is told
# what the chain has for it.
MAX_WAITING = 1_024


# What keeps a request from its answer.
Cause = Refused | BackendFailure | DeadlinePassed

# What a backend refused or never got costs nothing.
_UNBILLED = frozenset(
    {
        FailureKind.THROTTLED,
        FailureKind.ACCESS_DENIED,
        FailureKind.BACKEND_UNAVAILABLE,
        FailureKind.MODEL_NOT_FOUND,
        FailureKind.INVALID_INPUT,
    }
)


class FallbackChain:
    """Walks the steps of :class:`gateway.generation.fallback_policy.FallbackPolicy` until one answers.

    Args:
        answers: those that were given before.
        limits: bounds of the backends that are legs.
        admission: each step that generates passes it.
        dispatcher: generates.
        backends: those that legs name.
        clock: seconds, monotonic.
        on_engine: the backends that share the engine in process.
        emit: told when the base model answered in an adapter's place; must not block.
    """

    def __init__(
        self,
        *,
        answers: AnswerCache,
        limits: LegLimits,
        admission: AdmissionController,
        dispatcher: Dispatcher,
        backends: Mapping[str, Backend],
        clock: Callable[[], float],
        on_engine: Collection[str] = (),
        emit: Callable[[AdapterReplacedByBase], None] = lambda event: None,
    ) -> None:
        self._answers = answers
        self._limits = limits
        self._admission = admission
        self._dispatcher = dispatcher
        self._backends = backends
        self._clock = clock
        self._on_engine = frozenset(on_engine)
        self._emit = emit
        self._waiting = 0

    async def answer(self, cause: Cause, job: Job, stream: AnswerStream) -> GenerationOutcome:
        """Answer in spite of ``cause``; re-raise it when that cannot be done or may not.

        Whatever takes all the time there is leaves some for what is kept: an answer given before, or the
        degraded text. A part that the caller has is gone on with or stays a part. A caller who wants errors
        gets no other backend's answer, but the same backend may go on with its own. When the fault lies in
        the request itself nothing is tried: bad input is never answered by a fallback.

        Raises:
            Refused, BackendFailure: ``cause``.
            DeadlinePassed: before the first token, and nothing can be given in its place.
        """
        try:
            if isinstance(cause, DeadlinePassed):
                raise cause
            return await self._go_on(cause, job, stream)
        except DeadlinePassed as passed:
            return await self._late(cause, passed, job, stream)

    async def _go_on(
        self, cause: Refused | BackendFailure, job: Job, stream: AnswerStream
    ) -> GenerationOutcome:
        if isinstance(cause, Refused):
            stream.refused(job.primary.name, cause)
        elif not cause.policy.other_backend:
            raise cause
        if (plain := without_adapter(cause, job, stream)) is not None:
            return await self._on_base(cause, plain, job, stream)
        if not _may_go_on(cause):
            if stream.committed:
                raise cause
            stream.rewind()
        primary, request = job.primary, job.request
        course = FallbackPolicy(
            primary.name,
            job.target.route.fallback if request.allow_fallback else (),
            job.target.route.resume,
            on_engine=self._on_engine,
            in_hand=isinstance(cause, BackendFailure) and stream.started_at is not None,
        )
        moved = _goes_on(primary, job, stream)
        self._note(course, primary, cause, moved=moved, unseen=_unseen(stream))
        while (step := course.next(self._view(job, stream))) is not None:
            if isinstance(step, WaitForRestart):
                await self._wait(course, step, job, stream)
            elif isinstance(step, TryBackend):
                outcome = await self._attempt(course, self._backends[step.backend], job, stream)
                if outcome is not None:
                    return self._named(outcome, cause, job)
            elif step.leg == RESPONSE_CACHE:
                with stream.steps.step(RESPONSE_CACHE) as looking:
                    found = await self._answers.find(job, self._left_s(job) - job.fallback_reserve_s)
                    looking.mode = "miss" if found is None else "hit"
                if found is not None:
                    return await _give(found, RESPONSE_CACHE, RESPONSE_CACHE, cause, job, stream)
                course.gave_nothing(step.leg)
            else:
                with stream.steps.step(DEGRADED):
                    return await _give(_degraded(job), step.leg, "degraded_response", cause, job, stream)
        if stream.committed and self._left_s(job) <= 0:
            return await cut_short(primary, job, stream)
        if not stream.committed:
            stream.rewind()  # nobody has seen it, nobody pays for it
        raise cause

    async def _late(
        self, cause: Cause, passed: DeadlinePassed, job: Job, stream: AnswerStream
    ) -> GenerationOutcome:
        """Give what is kept in the time that was left for it."""
        if stream.committed or not job.fallback_reserve_s:
            raise passed
        if RESPONSE_CACHE in job.target.route.fallback:
            with stream.steps.step(RESPONSE_CACHE) as looking:
                found = await self._answers.find(job, self._left_s(job) / 2)
                looking.mode = "miss" if found is None else "hit"
            if found is not None:
                return await _give(found, RESPONSE_CACHE, RESPONSE_CACHE, cause, job, stream)
        with stream.steps.step(DEGRADED):
            return await _give(_degraded(job), DEGRADED, "degraded_response", cause, job, stream)

    def remember(self, job: Job, outcome: GenerationOutcome, answer: Answer) -> None:
        """Keep an answer to the whole prompt for the day when nothing better can be had."""
        asked = outcome.plan is job.plan and outcome.adapter is job.lease.adapter
        if asked and RESPONSE_CACHE in job.target.route.fallback:
            self._answers.remember(job, answer)

    async def _on_base(
        self, cause: Refused | BackendFailure, plain: Job, job: Job, stream: AnswerStream
    ) -> GenerationOutcome:
        """Answer without the adapter, on the same backend first."""
        stream.rewind()
        try:
            async with self._admission.admit(demand_of(plain, plain.primary, stream)) as slot:
                outcome = await self._dispatcher.generate(slot, plain.primary, plain, stream)
        except (Refused, BackendFailure) as failure:
            outcome = await self._go_on(failure, plain, stream)
        if not outcome.completion.usage.input_tokens:
            return outcome  # no model has answered
        adapter = job.lease.adapter
        self._emit(AdapterReplacedByBase("" if adapter is None else adapter.adapter_id))
        return replace(outcome, warnings=(*outcome.warnings, warning_of(job, cause)))

    def _view(self, job: Job, stream: AnswerStream) -> Situation:
        primary = job.primary
        restarts = isinstance(primary, Restarting) and self._waiting < MAX_WAITING and self._left_s(job) > 0
        # Nobody is kept waiting for a backend that could not go on with what he has of the answer.
        restarts = restarts and (not stream.committed or _goes_on(primary, job, stream))
        back_in_s = primary.ready_in_s if isinstance(primary, Restarting) else None
        if primary.state is BackendState.READY:
            back_in_s = 0.0
        return Situation(
            able=lambda name: self._able(self._backends[name], job, stream),
            back_in_s=back_in_s,
            restarts=restarts,
            committed=stream.committed,
            in_time=job.request.deadline is not None
            and back_in_s is not None
            and back_in_s < self._left_s(job) - job.fallback_reserve_s,
        )

    def _able(self, backend: Backend, job: Job, stream: AnswerStream) -> bool:
        if backend.state is not BackendState.READY or job.must_honour - backend.features:
            return False
        return not stream.committed or _goes_on(backend, job, stream)

    async def _wait(
        self, course: FallbackPolicy, step: WaitForRestart, job: Job, stream: AnswerStream
    ) -> None:
        """Wait for the primary's engine, never past the deadline."""
        began_at = self._clock()
        timeout_s = min(
            step.timeout_s, self._left_s(job) - (0.0 if stream.committed else job.fallback_reserve_s)
        )
        back = False
        if timeout_s > 0 and isinstance(job.primary, Restarting):
            self._waiting += 1
            try:
                with stream.steps.step("wait", job.primary.name) as waiting:
                    back = await job.primary.wait_ready(timeout_s)
                    waiting.mode = "back" if back else "away"
            finally:
                self._waiting -= 1
        course.waited(max(0.0, step.timeout_s - (self._clock() - began_at)), back=back)

    async def _attempt(
        self, course: FallbackPolicy, backend: Backend, job: Job, stream: AnswerStream
    ) -> GenerationOutcome | None:
        """Ask a backend to answer, or to go on with the answer; the chain goes on when it cannot."""
        demand = demand_of(job, backend, stream)
        goes_on = _goes_on(backend, job, stream)
        if goes_on or (backend.name == job.primary.name and stream.started_at is not None):
            demand = readmission_demand(demand, job, stream.tokens if goes_on else 0, stream, self._clock())
        permit = self._permit(backend, job, demand)
        if permit is None:
            stream.steps.refused(backend.name, "leg_limit")
            course.refused(backend.name, memory=False)
            return None
        if stream.has_output and not goes_on:
            stream.rewind()
        given, before = stream.chars, stream.tokens
        try:
            with permit:
                try:
                    async with self._admission.admit(demand) as slot:
                        outcome = await self._dispatcher.generate(slot, backend, job, stream)
                except (Refused, BackendFailure) as failure:
                    if isinstance(failure, Refused) or failure.kind in _UNBILLED:
                        permit.settle(LegUsage())
                    raise
                usage = outcome.completion.usage
                permit.settle(
                    LegUsage(demand.input_tokens, max(0, usage.output_tokens - before), usage.cached_tokens)
                )
                return outcome
        except (Refused, BackendFailure) as failure:
            if isinstance(failure, Refused):
                stream.refused(backend.name, failure)
            # The guard and admission have told what failed here.
            # A backend that refuses to go on is no fault of the request; what is nonsense stays so.
            refused = isinstance(failure, BackendFailure) and not failure.policy.other_backend
            if not _may_go_on(failure) and not refused:
                if stream.committed:
                    raise
                stream.rewind()
            gave = stream.chars > given
            moved = gave and _goes_on(backend, job, stream)
            self._note(course, backend, failure, moved=moved, unseen=gave and _unseen(stream))
            return None
        except DeadlinePassed:
            if not stream.committed:
                raise
            return await cut_short(backend, job, stream)

    def _permit(self, backend: Backend, job: Job, demand: Demand) -> Permit | None:
        """A place in a leg; the primary is nobody's leg, whenever it is asked."""
        if backend.name == job.primary.name:
            return self._limits.free()
        return self._limits.enter(backend.name, LegUsage(demand.input_tokens, demand.max_output_tokens))

    def _note(
        self,
        course: FallbackPolicy,
        backend: Backend,
        cause: Refused | BackendFailure,
        *,
        moved: bool,
        unseen: bool,
    ) -> None:
        if isinstance(cause, Refused):
            course.refused(backend.name, memory=cause.reason is Reason.MEMORY_PRESSURE)
            return
        course.failed(
            backend.name,
            cause.kind,
            moved=moved and not cause.final,
            again=lambda: unseen and not cause.final and self._dispatcher.affords(backend, cause.kind),
            away=backend.state is not BackendState.READY,
        )

    def _named(
        self, outcome: GenerationOutcome, cause: Refused | BackendFailure, job: Job
    ) -> GenerationOutcome:
        if outcome.backend_name == job.primary.name:
            return outcome
        return replace(outcome, fallback=_fallback(outcome.backend_name, cause))

    def _left_s(self, job: Job) -> float:
        deadline = job.request.deadline
        return float("inf") if deadline is None else deadline - self._clock()


def _goes_on(backend: Backend, job: Job, stream: AnswerStream) -> bool:
    """Whether a backend would go on with what there is; of what nobody has seen it rather makes a new one
    than finish it from its text.
    """
    mode = mode_on(backend, job, stream) if stream.chars else None
    return mode is not None and (stream.committed or mode is not Mode.TEXT)


def _unseen(stream: AnswerStream) -> bool:
    """Whether there is a part of an answer that the caller has nothing of."""
    return stream.chars > 0 and not stream.committed


def _may_go_on(cause: Refused | BackendFailure) -> bool:
    return isinstance(cause, Refused) or cause.policy.resumes


def _fallback(kind: str, cause: Cause) -> Fallback:
    if isinstance(cause, DeadlinePassed):
        # Whose fault it is nobody can tell: a deadline may be too short for anything.
        return Fallback(kind, Reason.WAIT_EXCEEDED.value, None)
    reason = cause.reason.value if isinstance(cause, Refused) else cause.kind.value
    retry_after_ms = None if cause.retry_after_s is None else max(1, round(cause.retry_after_s * 1000))
    return Fallback(kind, reason, retry_after_ms)


def _degraded(job: Job) -> Found:
    return Found(job.target.route.degraded_text, FinishReason.DEGRADED)


async def _give(
    found: Found, leg: str, kind: str, cause: Cause, job: Job, stream: AnswerStream
) -> GenerationOutcome:
    stream.rewind()
    await stream.take(Delta(found.text, 0))
    await stream.commit()
    return GenerationOutcome(
        completion=Completion(found.finish_reason, Usage()),
        backend=leg,
        backend_name=leg,
        model=job.primary.model,
        plan=job.plan,
        fallback=_fallback(kind, cause),
        warnings=found.warnings,
    )
