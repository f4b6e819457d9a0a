"""After a failure: resume the answer, or serve another one by the route's fallback chain."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from adapters.events import AdapterReplacedByBase
from admission.controller import AdmissionController
from admission.errors import Refused
from admission.values import Demand, Reason
from gateway.backends.port import Backend, BackendState, Completion, configured_name, generates, restarting
from gateway.contracts.answer import Answer, Fallback
from gateway.contracts.events import Delta, Reasoning
from gateway.contracts.values import FinishReason, Usage
from gateway.errors import DeadlineExceeded
from gateway.generation.answer_cache import AnswerCache
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.demand import demand_after_wait, demand_of, readmission_demand
from gateway.generation.dispatcher import Dispatcher, GenerationOutcome, cut_short
from gateway.generation.job import Job, replanning_warning, warning_of, without_adapter
from gateway.generation.resume import modes_on
from resilience.errors import DeadlinePassed
from resilience.failures import BackendFailure, CannotResume, FailureKind
from resilience.fallback_policy import (
    DEGRADED,
    RESPONSE_CACHE,
    FallbackPolicy,
    Situation,
    TryBackend,
    WaitForRestart,
)
from resilience.leg_limits import LegLimits, Permit
from resilience.response_cache_values import CachedAnswer
from resilience.resume import ResumeMode

# The most requests that wait for an engine's restart. Each holds its prompt and a connection; any further
# request takes the next step at once.
MAX_WAITING = 1_024


Cause = Refused | BackendFailure | DeadlinePassed  # the error that a fallback replaces

# Before its first token, the backend refused the request or never received it: nothing is billed.
_UNBILLED = frozenset(
    {
        FailureKind.THROTTLED,
        FailureKind.ACCESS_DENIED,
        FailureKind.BACKEND_UNAVAILABLE,
        FailureKind.MODEL_NOT_FOUND,
        FailureKind.INVALID_INPUT,
        FailureKind.TOKEN_LIMIT_EXCEEDED,
    }
)


@dataclass(slots=True, eq=False, kw_only=True)
class FallbackChain:
    """Takes the steps of :class:`resilience.fallback_policy.FallbackPolicy` until one answers.

    Args:
        limits: the limits of backends as fallback targets.
        admission: admits each step that generates.
        on_engine: the backends on in-process engines.
        emit: takes an event if the base model answered instead of an adapter; must not block.
    """

    answers: AnswerCache
    limits: LegLimits
    admission: AdmissionController
    dispatcher: Dispatcher
    backends: Mapping[str, Backend]
    clock: Callable[[], float]
    on_engine: Collection[str] = ()
    emit: Callable[[AdapterReplacedByBase], None] = lambda event: None
    _waiting: int = field(default=0, init=False)

    async def answer(self, cause: Cause, job: Job, stream: AnswerStream) -> GenerationOutcome:
        """Answer in spite of ``cause``; re-raise it if that is not possible or not allowed.

        Every step leaves time to serve a stored text: a cached answer, or the degraded text. A part that the
        caller has is resumed, or stays a partial answer. A caller that refuses fallbacks gets no other
        backend's answer, but the same backend may resume its own. A fault of the request has no fallback.

        Raises:
            Refused, BackendFailure: ``cause``, or the failure that broke the part that the caller has.
            DeadlinePassed: before the first token, if no stored text may be served.
        """
        try:
            if isinstance(cause, DeadlinePassed):
                raise cause
            return await self._fall_back(cause, job, stream)
        except DeadlinePassed:
            # Serve a stored text in the time that was reserved for it.
            if stream.committed or not job.fallback_reserve_s:
                raise
            for leg in (RESPONSE_CACHE, DEGRADED):
                if leg in job.fallback:
                    limit_s = self._time_left_s(job) / 2
                    if outcome := await self._serve_stored(leg, limit_s, cause, job, stream):
                        return outcome
            raise

    def remember(self, job: Job, outcome: GenerationOutcome, answer: Answer, stream: AnswerStream) -> None:
        """Store an answer to the unchanged prompt, to be served when no backend can answer."""
        as_asked = outcome.plan is job.plan and outcome.adapter is job.lease.adapter
        cut = stream.steps.shortened and answer.finish_reason is FinishReason.LENGTH  # by a long queue
        if as_asked and not cut and RESPONSE_CACHE in job.fallback:
            self.answers.remember(job, answer)

    async def _fall_back(
        self, cause: Refused | BackendFailure, job: Job, stream: AnswerStream
    ) -> GenerationOutcome:
        if isinstance(cause, Refused):
            stream.refused(job.primary.name, cause)
        elif not cause.policy.other_backend:
            stream.declined = not stream.has_output
            raise cause
        plain = without_adapter(cause, job, stream)
        if plain is not None and job.call_budget.allows(job.primary.name):
            return await self._on_base_model(cause, plain, job, stream)
        if not _resumable_after(cause):
            if stream.committed:
                raise cause
            stream.rewind()
        primary = job.primary
        policy = FallbackPolicy(
            primary.name,
            self._legs(job),
            job.target.route.resume,
            on_engine=self.on_engine,
            in_hand=isinstance(cause, BackendFailure)
            and stream.started_at is not None
            and cause.kind is not FailureKind.BACKEND_UNAVAILABLE,  # e.g. a refused connection
        )
        self._record(policy, primary, cause, job, stream)
        told, waited = cause, False
        while (step := policy.next(self._situation(policy, job, stream))) is not None:
            if isinstance(step, WaitForRestart):
                await self._wait(policy, step, job, stream)
                waited = True
            elif isinstance(step, TryBackend):
                backend = primary if step.backend == policy.primary else self.backends[step.backend]
                committed = stream.committed
                outcome = await self._try(policy, backend, job, stream, waited=waited)
                if isinstance(outcome, GenerationOutcome):
                    fallback = None if backend is primary else _fallback(backend.name, cause)
                    return replace(outcome, fallback=fallback)
                if outcome is not None and stream.committed and not committed:
                    told = outcome  # it broke the part that the caller has
            else:
                left_s = self._time_left_s(job)
                limit_s = max(left_s - job.fallback_reserve_s, left_s / 2)
                if outcome := await self._serve_stored(step.leg, limit_s, cause, job, stream):
                    return outcome
                policy.refused(step.leg)
        if stream.committed and self._time_left_s(job) <= 0:
            return await cut_short(primary, job, stream)
        if not stream.committed:
            stream.rewind()  # the caller has no part of the answer, and is not billed for it
        raise told

    async def _on_base_model(
        self, cause: Refused | BackendFailure, plain: Job, job: Job, stream: AnswerStream
    ) -> GenerationOutcome:
        """Answer without the adapter, on the same backend first."""
        stream.rewind()
        try:
            async with self.admission.admit(demand_of(plain, plain.primary, stream)) as slot:
                outcome = await self.dispatcher.generate(slot, plain.primary, plain, stream)
        except (Refused, BackendFailure) as failure:
            outcome = await self._fall_back(failure, plain, stream)
        if not outcome.completion.usage.input_tokens:
            return outcome  # no model has answered
        self.emit(AdapterReplacedByBase(job.lease.adapter_id or ""))
        return replace(outcome, warnings=(*outcome.warnings, warning_of(job, cause)))

    def _situation(self, policy: FallbackPolicy, job: Job, stream: AnswerStream) -> Situation:
        primary = job.primary

        def able(leg: str) -> bool:
            return self._able(primary if leg == policy.primary else self.backends.get(leg), job, stream)

        left_s = self._time_left_s(job)
        back_in_s, loading = None, False
        engine = restarting(primary)
        if engine is not None:
            back_in_s, loading = engine.ready_in_s, engine.absence.loading
        if primary.state is BackendState.READY:
            back_in_s = 0.0
        return Situation(
            able=able,
            back_in_s=back_in_s,
            restarts=(
                engine is not None
                and self._waiting < MAX_WAITING
                and left_s > 0
                and job.call_budget.allows(primary.name)
                and (not stream.committed or _would_resume(primary, job, stream))
            ),
            committed=stream.committed,
            in_time=_worth_waiting(job, back_in_s, left_s - job.fallback_reserve_s, loading=loading),
            left_s=left_s,
        )

    def _legs(self, job: Job) -> tuple[str, ...]:
        """Return the chain; of a pool with the request's model, only the backend of that model."""
        legs, model = job.fallback, job.primary.model
        models = {leg: self.backends[leg].model for leg in legs if "/" in leg and leg in self.backends}
        having = {configured_name(leg) for leg in models if models[leg] == model}
        return tuple(
            leg for leg in legs if configured_name(leg) not in having or models.get(leg, model) == model
        )

    def _able(self, backend: Backend | None, job: Job, stream: AnswerStream) -> bool:
        if backend is None or not generates(backend):  # None: its pool no longer serves the model
            return False
        if backend.state is not BackendState.READY or job.lacking(backend):
            return False
        if not job.request.caller.may_use(backend.model):
            return False
        may_call = job.call_budget.allows(backend.name)
        return may_call and (not stream.committed or _would_resume(backend, job, stream))

    async def _wait(
        self, policy: FallbackPolicy, step: WaitForRestart, job: Job, stream: AnswerStream
    ) -> None:
        """Wait for the primary's engine, at most until the deadline."""
        began_at = self.clock()
        reserve_s = 0.0 if stream.committed else job.fallback_reserve_s
        timeout_s = min(step.timeout_s, self._time_left_s(job) - reserve_s)
        back = False
        engine = restarting(job.primary)
        if timeout_s > 0 and engine is not None:
            self._waiting += 1
            try:
                with stream.steps.step("wait", job.primary.name) as waiting:
                    back = await engine.wait_ready(timeout_s)
                    waiting.mode = "back" if back else "away"
            finally:
                self._waiting -= 1
        policy.waited(max(0.0, step.timeout_s - (self.clock() - began_at)), back=back)

    async def _try(
        self, policy: FallbackPolicy, backend: Backend, job: Job, stream: AnswerStream, *, waited: bool
    ) -> GenerationOutcome | Refused | BackendFailure | None:
        """Let a backend answer, or resume the answer; return its failure, ``None`` if it was not asked.

        ``waited``: the request has waited for the primary's engine.
        """
        try:
            planned = await job.planned_on(backend)
        except DeadlineExceeded:
            if not stream.committed:
                raise DeadlinePassed(backend=backend.name, attempts=0) from None
            return await cut_short(backend, job, stream)
        if planned is None:
            stream.steps.refused(backend.name, "context_too_long")
            policy.refused(policy.asked)
            return None
        first, job = job, planned
        demand = demand_of(job, backend, stream)
        resumes = _would_resume(backend, job, stream)
        is_primary = backend.name == job.primary.name
        if resumes or (is_primary and stream.started_at is not None):
            demand = readmission_demand(demand, job, stream.tokens if resumes else 0, stream, self.clock())
        elif waited:
            demand = demand_after_wait(demand, job, self.clock())
        # The limits of fallback targets never apply to the primary.
        most = demand.input_tokens, self.admission.expected_output(demand)
        permit = self.limits.free() if is_primary else self.limits.enter(backend.name, *most)
        if permit is None:
            stream.steps.refused(backend.name, "leg_limit")
            policy.refused(policy.asked)
            return None
        if stream.has_output and not resumes and not stream.committed:
            stream.rewind()
        chars_before = stream.chars
        try:
            outcome = await self._generate(permit, demand, backend, job, stream)
            return replace(outcome, warnings=(*replanning_warning(first, job), *outcome.warnings))
        except (Refused, BackendFailure) as failure:
            # The retry loop and admission have already reported the failure.
            if isinstance(failure, Refused):
                stream.refused(backend.name, failure)
            # A refusal to resume is not the request's fault; degenerate output is not resumed.
            cannot_resume = isinstance(failure, BackendFailure) and not failure.policy.other_backend
            gave = stream.chars > chars_before
            refused = cannot_resume or isinstance(failure, CannotResume)
            if resumes and refused and not gave and not stream.committed:
                stream.rewind()  # the same backend is asked for a new answer
                return failure
            if not _resumable_after(failure) and not cannot_resume:
                if stream.committed:
                    raise
                stream.rewind()
            self._record(policy, backend, failure, job, stream, gave=gave)
            return failure
        except DeadlinePassed:
            if not stream.committed:
                raise
            return await cut_short(backend, job, stream)

    async def _generate(
        self, permit: Permit, demand: Demand, backend: Backend, job: Job, stream: AnswerStream
    ) -> GenerationOutcome:
        before = stream.tokens
        with permit:
            try:
                async with self.admission.admit(demand) as slot:
                    outcome = await self.dispatcher.generate(slot, backend, job, stream)
            except (Refused, BackendFailure) as failure:
                if isinstance(failure, Refused) or (failure.kind in _UNBILLED and stream.tokens <= before):
                    permit.settle()
                raise
            usage = outcome.completion.usage
            # A partial answer is input; the usage counts it as output.
            input_tokens, output_tokens = usage.input_tokens + before, max(0, usage.output_tokens - before)
            permit.settle(input_tokens, output_tokens, usage.cached_tokens, usage.cache_write_tokens)
            return outcome

    def _record(
        self,
        policy: FallbackPolicy,
        backend: Backend,
        cause: Refused | BackendFailure,
        job: Job,
        stream: AnswerStream,
        *,
        gave: bool = True,
    ) -> None:
        """Tell the policy of a failure; ``gave``: the backend may have given a part of the answer."""
        if isinstance(cause, Refused):
            policy.refused(policy.asked, memory=cause.reason is Reason.MEMORY_PRESSURE)
            return
        again = gave and not cause.no_retry_here
        # A whole answer may be requested again: it was begun, and the caller has no part of it.
        begun = stream.chars > 0 and not stream.committed
        repeatable = again and begun and job.call_budget.allows(backend.name)
        policy.failed(
            policy.asked,
            cause.kind,
            moved=again and _would_resume(backend, job, stream),
            may_retry=lambda: repeatable and self.dispatcher.retries.affords(backend.name, cause.kind),
            away=backend.state is not BackendState.READY,
        )

    async def _serve_stored(
        self, leg: str, limit_s: float, cause: Cause, job: Job, stream: AnswerStream
    ) -> GenerationOutcome | None:
        """Serve the stored text of ``leg``; ``None`` if there is none."""
        with stream.steps.step(leg) as step:
            if leg == RESPONSE_CACHE:
                found, kind = await self.answers.find(job, limit_s), RESPONSE_CACHE
                step.mode = "miss" if found is None else "hit"
                if found is None:
                    return None
            else:
                text = job.target.route.config.degraded_text
                found, kind = CachedAnswer(text, FinishReason.DEGRADED.value), "degraded_response"
            similar = found.similarity
            step.mode = step.mode if similar is None else "similar"
            stream.rewind()
            # A stored answer is one to this request's adapter; the degraded text is nobody's.
            adapter = job.lease.adapter if leg == RESPONSE_CACHE else None
            stream.stored(job.plan, job.primary.model if adapter is None else adapter.adapter_id)
            if found.reasoning:
                await stream.take(Reasoning(found.reasoning, 0))
            await stream.take(Delta(found.text, 0))
            await stream.commit()
        return GenerationOutcome(
            completion=Completion(FinishReason(found.finish_reason), Usage()),
            backend=leg,
            backend_name=leg,
            model=job.primary.model,
            plan=job.plan,
            adapter=adapter,
            fallback=_fallback(kind, cause),
            warnings=() if similar is None else (f"answered from a similar question ({similar:.2f})",),
        )

    def _time_left_s(self, job: Job) -> float:
        return job.deadline - self.clock()


def _worth_waiting(job: Job, back_in_s: float | None, left_s: float, *, loading: bool) -> bool:
    """Whether a request without a partial answer waits for the primary's engine.

    If the engine's return cannot be estimated, it waits only for a starting engine. With a deadline, it waits
    if the engine is expected back in time; without one, if the engine is starting, no degraded text may be
    served, and the engine is expected back within the route's ``max_wait_s``.
    """
    if back_in_s is None:
        return loading
    if job.request.deadline is not None:
        return back_in_s < left_s
    return loading and DEGRADED not in job.fallback and back_in_s < job.target.route.resume.max_wait_s


def _would_resume(backend: Backend, job: Job, stream: AnswerStream) -> bool:
    """Whether a backend would resume the answer. If the caller does not have the part yet, a new answer is
    better than one that is resumed from its text.
    """
    modes = modes_on(backend, job, stream) if stream.chars else ()
    return bool(modes) and (stream.committed or modes[0] is not ResumeMode.TEXT)


def _resumable_after(cause: Refused | BackendFailure) -> bool:
    return isinstance(cause, Refused) or cause.policy.resumes


def _fallback(kind: str, cause: Cause) -> Fallback:
    if isinstance(cause, DeadlinePassed):
        # Not a backend's failure: the deadline may be too short for any backend.
        return Fallback(kind, Reason.WAIT_EXCEEDED.value, None)
    reason = cause.reason.value if isinstance(cause, Refused) else cause.kind.value
    retry_after_ms = None if cause.retry_after_s is None else max(1, round(cause.retry_after_s * 1000))
    return Fallback(kind, reason, retry_after_ms)
