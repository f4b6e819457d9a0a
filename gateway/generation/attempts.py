"""The work of each attempt on a backend: the whole or the rest of an answer, modified after some failures."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from admission.queue import Slot
from budgeting.plan import INLINE_CHARS
from budgeting.values import Plan
from gateway.backends.port import Backend, PartialAnswer, Work
from gateway.contracts.features import Feature
from gateway.contracts.values import NATIVE, GenerateRequest, Sampling
from gateway.generation.answer_stream import AnswerOrigin, AnswerStream
from gateway.generation.job import Job
from gateway.generation.resume import resumes_exactly, resumption_on
from observability.trace_steps import TraceStep
from resilience.failures import POLICIES, BackendFailure, FailureKind, Remedy
from resilience.resume import ResumeMode, Resumption, Spelling
from resilience.retry import Attempt

# The sampling hints that may be dropped in the native contract; the values are the hints' names.
HINTS = (Feature.TEMPERATURE, Feature.TOP_P, Feature.TOP_K, Feature.MIN_P, Feature.SEED)
# As constants, as in ``gateway.contracts.values``.
NOTHING, OTHER_SEED, SHORTER_CONTEXT = Remedy.NOTHING, Remedy.OTHER_SEED, Remedy.SHORTER_CONTEXT
FIELDS_PASSED = Feature.FIELDS_PASSED
_SEED_BITS = 0x7FFF_FFFF  # seeds that the gateway makes have 31 bits, which every backend accepts


class Attempts(Struct, eq=False):
    """The attempts of one request on one backend, in order; ``step`` is the current one's trace step.

    ``notes`` are the warnings about what was omitted or changed for this backend.
    """

    backend: Backend
    _job: Job
    stream: AnswerStream
    _slot: Slot
    _spelling: Callable[[str], Spelling]
    notes: list[str] = []
    _shortened: Plan | None = None
    step: TraceStep | None = None

    async def next(self, this: Attempt) -> tuple[Work, Resumption | None]:
        """Return the work of one attempt, and how it resumes a partial answer; prepares the stream.

        Raises BackendFailure ``stream_broken`` if the caller has a part of the answer and this backend cannot
        resume it.
        """
        stream, change = self.stream, NOTHING
        if this.after is not None:
            change = POLICIES[this.after].retry_with
        if stream.chars and (stream.committed or change is NOTHING):
            # A long answer may have to be encoded again, so in a thread; nothing else uses the stream now.
            resumption = (
                await asyncio.to_thread(resumption_on, self.backend, self._job, stream, self._spelling)
                if stream.chars > INLINE_CHARS
                else resumption_on(self.backend, self._job, stream, self._spelling)
            )
            # If the caller does not have the part yet, a new answer is better than one of two models.
            if resumption is not None and (stream.committed or resumption.mode is not ResumeMode.TEXT):
                return self._rest(resumption, change), resumption
        if stream.committed:
            message = f"{self.backend.name} cannot resume the answer"
            raise BackendFailure(FailureKind.STREAM_BROKEN, message)
        if stream.has_output:
            stream.rewind()
        if change is SHORTER_CONTEXT and self._shortened is None:
            # Only once: if half of the prompt does not help, another backend gets all of it.
            self._shortened = await self._job.half_plan()
            if self._shortened is not None:
                self.notes.append(
                    f"the prompt was shortened from {self._job.plan.counts.total}"
                    f" to {self._shortened.counts.total}"
                    f" tokens because {self.backend.name} ran out of memory"
                )
        return self._whole(this, change), None

    def _rest(self, resumption: Resumption, change: Remedy) -> Work:
        origin, backend, stream = self.stream.origin, self.backend, self.stream
        if origin is None:
            raise RuntimeError("an answer is resumed that was never begun")
        known = resumption.token_ids if resumption.mode is ResumeMode.EXACT else None
        stream.resume(known, resumption.tokens, backend.name, resumption.mode.value)
        served_model = self._job.served_model(backend)
        if not self._job.plan_holds(origin.model):
            plan = self._job.plan
            origin = replace(origin, plan=plan, max_tokens=min(origin.max_tokens, plan.generation_reserve))
        origin = replace(origin, backend=backend.name, model=backend.model, served_model=served_model)
        stream.started(origin, self._slot.first_token)
        seed = self._seed(1) if change is OTHER_SEED else None
        partial = None
        if resumption.text or stream.events is not None:
            ids, generated = resumption.token_ids, None
            if stream.events is not None:
                # An incomplete character at the end comes with the next token.
                spelled = b"".join(map(self._spelling(backend.model).text_bytes, ids or ()))
                generated = spelled.decode("utf-8", errors="ignore")
            partial = PartialAnswer(resumption.text, ids, generated, resumption.tokens)
        # The text's encoding may have more ids than the first backend generated.
        spent = max(stream.tokens, len(resumption.token_ids or ()))
        return self._work(origin.plan, origin.max_tokens - spent, partial, seed)

    def _whole(self, this: Attempt, change: Remedy) -> Work:
        plan, max_tokens = self._shortened or self._job.plan, self._job.plan.generation_reserve
        if self._slot.shrunk:
            # Shrink before shed: a long queue shortens answers, with a warning.
            max_tokens = max(1, self._slot.max_tokens // self._job.request.sampling.n)
            self.stream.steps.shortened = True
            self.notes.append(f"max_tokens was lowered to {max_tokens} because many requests are waiting")
        if self._job.request.stream:
            self._hold()
        backend = self.backend
        served_model = self._job.served_model(backend)
        origin = AnswerOrigin(backend.name, backend.model, served_model, plan, max_tokens)
        self.stream.started(origin, self._slot.first_token)
        seed = self._seed(this.number) if change is OTHER_SEED else None
        return self._work(plan, max_tokens, None, seed)

    def _hold(self) -> None:
        """Hold the first chunks, unless a broken answer could be resumed exactly."""
        rules = self._job.target.route.resume
        exactly = rules.enabled and resumes_exactly(self.backend, self._job)
        if rules.commit_chunks and not exactly:
            self.stream.hold(rules.commit_chunks, rules.commit_s)

    def _seed(self, number: int) -> int:
        """Return another seed than the request's, equal for each repetition of the request."""
        seed = self._job.request.sampling.seed
        start = zlib.crc32(self._job.request.generation_id.encode()) if seed is None else seed
        return (start + number) & _SEED_BITS

    def _work(self, plan: Plan, max_tokens: int, partial: PartialAnswer | None, seed: int | None) -> Work:
        request, sampling = self._job.request, self._job.request.sampling
        if seed is not None and Feature.SEED in self.backend.features:
            sampling = replace(sampling, seed=seed)
        changed, warnings = fitted(sampling, request, self.backend)
        self.notes.extend(warnings)
        if sampling.max_tokens != max_tokens:
            changed["max_tokens"] = max_tokens
        if sampling.ignore_eos and request.is_shaped:
            changed["ignore_eos"] = False  # vLLM would go on after the form's end, with any text
        # In order where the names are the fields': with more than 15 keywords the call would build a dict.
        return Work(
            request.generation_id,
            plan.token_ids,
            plan.messages,
            replace(sampling, **changed) if changed else sampling,
            request.response_format,
            self._job.lease.adapter,
            request.priority,
            request.caller.cache_salt,
            request.caller.tenant,
            request.caller.org,
            request.user,
            request.session_id,
            request.request_id,
            request.deadline,
            plan.prefix_tokens,
            stream=request.stream,
            partial=partial,
            open_ended=plan.open_ended and not self._slot.shrunk and partial is None,
            extra=request.extra if FIELDS_PASSED in self.backend.features else {},
            images=self._job.images,
            image_tokens=plan.image_tokens,
            tools=plan.tools,
            tool_choice=request.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls,
            call_format=request.call_format,
            reasoning_effort=plan.reasoning_effort or request.reasoning_effort,
            template_kwargs=request.template_kwargs,
            calls=self.step,
            call_budget=self._job.call_budget,
        )


def fitted(
    sampling: Sampling, request: GenerateRequest, backend: Backend
) -> tuple[dict[str, Any], list[str]]:
    """Return the sampling fields to change for a backend, and warnings about changed and dropped fields.

    In the native contract a sampling hint that the backend lacks is dropped or lowered, with a warning. In
    OpenAI's contract this cannot occur, because ranking skips such backends.
    """
    changed: dict[str, Any] = {}
    passed = FIELDS_PASSED in backend.features
    dropped = (*(() if passed else request.extra), *request.dropped)
    warnings = [f"{name} is not a known field and was dropped" for name in dropped] if dropped else []
    if request.contract is not NATIVE:
        return changed, warnings
    for feature in HINTS:
        if feature not in backend.features and getattr(sampling, feature) is not None:
            changed[feature.value] = None
            warnings.append(f"{feature.value} is not supported by {backend.name} and was dropped")
    hot = sampling.temperature is not None and sampling.temperature > 1.0
    if hot and "temperature" not in changed and Feature.TEMPERATURE_ABOVE_1 not in backend.features:
        changed["temperature"] = 1.0
        warnings.append(f"temperature was lowered to 1, the highest that {backend.name} takes")
    return changed, warnings
