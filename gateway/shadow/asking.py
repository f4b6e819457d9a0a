"""Sends the copy of an answered request to another backend, only if that has idle capacity.

A shadow request does not affect callers: it has no retry (the retry budget is the callers'), no fallback, and
no effect on the circuit breaker or the learned limits. It uses one sequence of the backend, only while no
request waits there and at most a share of the backend is in use.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from accounting.account import Accounts
from accounting.values import UsageRow
from adapters.errors import AdapterError
from adapters.registry import AdapterRegistry
from adapters.values import Selection
from admission.circuit import CircuitState
from admission.controller import AdmissionController
from admission.errors import Refused
from budgeting.token_ids import TokenIds
from budgeting.values import NO_KWARGS, Message, Plan, SectionCounts, Tool, ToolCall
from gateway.backends.port import Backend, BackendState, Completion, Work
from gateway.backends.sampling import features_asked
from gateway.contracts.answer import Answer
from gateway.contracts.events import Delta
from gateway.contracts.features import TOOL_FEATURES, Feature
from gateway.contracts.values import Contract, FinishReason, GenerateRequest, Usage
from gateway.errors import PublicError
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.attempts import HINTS, Attempts
from gateway.generation.demand import demand_of
from gateway.generation.job import Job
from gateway.prompts.text import Models
from gateway.shadow.personal import Redactor, redact_calls, redact_json, redact_tools, redact_value
from gateway.shadow.sampling import Copy, ShadowOutcome
from resilience.classify import classify
from resilience.failures import FailureKind
from resilience.leg_limits import LegLimits
from resilience.retry import Attempt

# Features that the native contract may drop (docs/api.md); a shadow request may too.
DROPPABLE = frozenset({*HINTS, Feature.TEMPERATURE_ABOVE_1})
PRIORITY = -1  # lower than the priority of any caller
TENANT = ""  # the tenant of shadow requests in admission's fair queue; no key has an empty tenant
# Seconds. There was capacity just before, so a longer wait means that a caller took it.
MAX_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class ShadowAnswer:
    """The answer of a backend. Times are milliseconds since the call; ``failure`` is the failure's kind."""

    generation_id: str
    backend: str
    version: str
    text: str
    finish_reason: FinishReason
    usage: Usage
    ttft_ms: float | None
    total_ms: float
    failure: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class NotAsked(Exception):
    """Nothing was sent; ``outcome`` has the reason."""

    def __init__(self, outcome: ShadowOutcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Calls backends with idle capacity.

    Args:
        admission: has the gates that report idle capacity and admit shadow requests.
        adapters: leases the adapter of the caller's answer.
        limits: the spend limits of shadow requests, by backend.
        accounts: each shadow request gets a usage row of the kind ``shadow``, without a tenant.
        models: used to encode a prompt again for a backend with another tokenizer or length.
        redact: removes content that must not be sent.
        timeout_s: the time limit of one request.
        idle_share: share of a backend's sequences and memory in use, above which there is no idle capacity.
    """

    backends: Mapping[str, Backend]
    admission: AdmissionController
    adapters: AdapterRegistry
    limits: LegLimits
    accounts: Accounts
    models: Models
    redact: Redactor
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    new_id: Callable[[], str]
    timeout_s: float
    idle_share: float

    def idle(self, backend: str) -> bool:
        """Whether the backend is ready, its queue is empty, and enough of it is free.

        Also true for a pool of several models, which :meth:`ask` refuses.
        """
        found = self.backends.get(backend)
        if found is None:
            return True
        if found.state is not BackendState.READY:
            return False
        gate, now = self.admission.gate(backend), self.clock()
        load = found.load
        return (
            not gate.depth
            and gate.circuit.state(now) is CircuitState.CLOSED
            and gate.work.sequences < max(1.0, self.idle_share * gate.work.capacity(now))
            and (load is None or load.kv_usage < self.idle_share)
        )

    async def ask(self, copy: Copy) -> ShadowAnswer:
        """Send the copied request to the copy's backend, once.

        Raises NotAsked if the key may not use the model; if the backend lacks a feature, idle capacity or
        budget, or is a pool of several models; or if the redactor failed, so that nothing may be sent.
        """
        backend = self.backends.get(copy.backend)
        if backend is None:
            raise NotAsked(ShadowOutcome.UNABLE)
        request = _quiet(copy.request, self.new_id(), self.clock())
        asked = features_asked(request.sampling, request.response_format) | (request.needs & TOOL_FEATURES)
        if (asked - DROPPABLE) - backend.features or not request.caller.may_use(backend.model):
            raise NotAsked(ShadowOutcome.UNABLE)
        request, plan = await self._redacted(request, copy, backend.model)
        plan = self._fitted(plan, backend.model)
        adapter, can = copy.adapter, Feature.LORA in backend.features
        wish = adapter.adapter_id if adapter is not None and can and adapter.usable_at(backend.name) else None
        try:
            with self.adapters.lease(Selection(wish, operator=True)) as lease:
                job = Job(request, copy.target, plan, lease, backend)
                return await self._generate(backend, job)
        except AdapterError:
            raise NotAsked(ShadowOutcome.UNABLE) from None

    async def _generate(self, backend: Backend, job: Job) -> ShadowAnswer:
        stream = AnswerStream(job.request, _Nowhere(), self.clock)
        demand = demand_of(job, backend, stream)
        demand = structs.replace(
            demand,
            tenant=TENANT,
            priority=PRIORITY,
            kind=("shadow", *(demand.kind if isinstance(demand.kind, tuple) else (demand.kind,))),
            # No queue: there is capacity at once, or a caller took it. Input limits apply only to callers.
            limits=replace(
                demand.limits or self.admission.gate(backend.name).limits,
                max_queue=0,
                max_wait_s=MAX_WAIT_S,
                max_input_tokens=None,
            ),
        )
        permit = self.limits.enter(backend.name, demand.input_tokens, self.admission.expected_output(demand))
        if permit is None:
            raise NotAsked(ShadowOutcome.SPEND)
        adapter = job.lease.adapter
        version = f"{backend.model}+{adapter.adapter_id}" if adapter else backend.model
        row = _row(job, backend, version, self.unix_time())
        try:
            with permit:
                async with self.admission.admit(demand) as slot:
                    attempts = Attempts(backend, job, stream, slot, self.models.tokenizer)
                    work, _ = await attempts.next(Attempt(1))
                    with self.accounts.open(row) as account:
                        asked = await self._call(backend, work, stream, version)
                        account.settle(_closed(row, asked, stream))
                    # Only callers' requests count for the circuit breaker and the learned limits.
                    slot.ignored()
                usage = asked.usage
                permit.settle(
                    usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.cache_write_tokens
                )
        except Refused:
            raise NotAsked(ShadowOutcome.REFUSED) from None
        return asked

    async def _call(self, backend: Backend, work: Work, stream: AnswerStream, version: str) -> ShadowAnswer:
        """Call the backend once; raises nothing but a cancellation."""
        completion: Completion | None = None
        failure: FailureKind | None = None
        began = self.clock()
        try:
            async with asyncio.timeout(self.timeout_s):
                completion = await backend.generate(work, stream.take)
        except TimeoutError:
            failure = FailureKind.TIMEOUT
        except Exception as error:
            failure = classify(error, delivered=False).kind
        ended = self.clock()
        if completion is None:
            read = len(work.token_ids) if stream.has_output else 0
            completion = Completion(
                FinishReason.ERROR, Usage(read, stream.tokens, stream.cached_tokens), stream.queue_wait_s
            )
        waited_s, first_at = completion.queue_wait_s, stream.first_at
        return ShadowAnswer(
            generation_id=work.generation_id,
            backend=backend.name,
            version=version,
            text=stream.text(),
            finish_reason=completion.finish_reason,
            usage=completion.usage,
            ttft_ms=None if first_at is None else max(0.0, first_at - began - waited_s) * 1000,
            total_ms=max(0.0, ended - began - waited_s) * 1000,
            failure=None if failure is None else failure.value,
            reasoning=stream.reasoning(),
            tool_calls=stream.tool_calls(),
        )

    async def encode(
        self,
        model: str,
        messages: Sequence[Message],
        tools: tuple[Tool, ...] = (),
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> TokenIds:
        encode = self.models.of(model).tokenizer.encode_parts
        return (await asyncio.to_thread(partial(encode, messages, (), tools=tools, kwargs=kwargs))).token_ids

    async def _redacted(
        self, request: GenerateRequest, copy: Copy, model: str
    ) -> tuple[GenerateRequest, Plan]:
        """Return the redacted request and plan; the plan is encoded again only if the redactor changed a text
        or the tokenizer or length differs."""
        plan = copy.plan
        try:
            request = await asyncio.to_thread(self._cleaned, request)
            messages, tools = await asyncio.to_thread(self._clean, plan)
        except Exception:
            # The operator's function may raise anything; a text that was not redacted is not sent.
            raise NotAsked(ShadowOutcome.REDACTION_FAILED) from None
        planned_for = copy.answer.model if copy.adapter is None else copy.adapter.base_model
        same_text = self.models.of(planned_for) is self.models.of(model)
        shown = (messages, tools, request.template_kwargs)
        if same_text and shown == (plan.messages, plan.tools, copy.request.template_kwargs):
            return request, plan
        ids = await self.encode(model, messages, tools, request.template_variables)
        counts = plan.counts if same_text else SectionCounts(recent_turns=len(ids))
        return request, structs.replace(
            plan, messages=messages, tools=tools, token_ids=ids, counts=counts, prefix_tokens=0
        )

    def _cleaned(self, request: GenerateRequest) -> GenerateRequest:
        shape, sampling = request.response_format, request.sampling
        return structs.replace(
            request,
            sampling=structs.replace(sampling, stop=tuple(map(self.redact, sampling.stop))),
            response_format=replace(shape, spec=redact_json(shape.spec, self.redact)),
            extra=redact_value(dict(request.extra), self.redact),
            template_kwargs=redact_value(dict(request.template_kwargs), self.redact),
        )

    def _clean(self, plan: Plan) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        messages = [
            structs.replace(
                one,
                content=self.redact(one.content),
                name=None,
                reasoning=None,
                tool_calls=redact_calls(one.tool_calls, self.redact),
            )
            for one in plan.messages
        ]
        return tuple(messages), redact_tools(plan.tools, self.redact)

    def _fitted(self, plan: Plan, model: str) -> Plan:
        """Return the plan with an answer length that fits the model's context."""
        room = self.models.of(model).max_model_len - len(plan.token_ids)
        if room < 1:
            raise NotAsked(ShadowOutcome.UNABLE)
        return structs.replace(plan, generation_reserve=min(plan.generation_reserve, room))


class _Nowhere:
    """A sink that discards the answer."""

    discarded = False

    def planned(self, plan: Plan, model: str) -> None: ...

    async def delta(self, delta: Delta) -> None: ...

    async def finish(self, answer: Answer) -> None: ...

    async def fail(self, error: PublicError) -> None: ...


def _quiet(request: GenerateRequest, generation_id: str, now: float) -> GenerateRequest:
    return structs.replace(
        request,
        generation_id=generation_id,
        # In this contract, sampling hints that a backend does not support are dropped.
        contract=Contract.NATIVE,
        sampling=structs.replace(request.sampling, n=1, logprobs=None),
        # Names of the end user: they are not needed, and often mail addresses.
        user=None,
        session_id=None,
        priority=PRIORITY,
        arrived_at=now,
        deadline=None,
        stream=False,
        allow_fallback=False,
    )


def _row(job: Job, backend: Backend, version: str, unix_time: float) -> UsageRow:
    request, adapter = job.request, job.lease.adapter
    return UsageRow(
        generation_id=request.generation_id,
        request_id=request.request_id,
        tenant="",
        key_id="",
        contract=request.contract.value,
        route=job.target.route.name,
        started_at=unix_time,
        intent=request.intent,
        adapter_id=None if adapter is None else adapter.adapter_id,
        model=backend.model if adapter is None else adapter.adapter_id,
        prompt_version=job.target.prompt_version,
        backend=backend.kind,
        backend_name=backend.name,
        backend_version=version,
        trace_id=request.trace_id,
        kind="shadow",
    )


def _closed(row: UsageRow, asked: ShadowAnswer, stream: AnswerStream) -> UsageRow:
    return structs.replace(
        row,
        finish_reason=asked.finish_reason.value,
        error_code=asked.failure,
        input_tokens=asked.usage.input_tokens,
        output_tokens=asked.usage.output_tokens,
        cached_tokens=asked.usage.cached_tokens,
        cache_write_tokens=asked.usage.cache_write_tokens,
        queue_wait_ms=stream.queue_wait_s * 1000,
        ttft_ms=asked.ttft_ms,
        total_ms=asked.total_ms,
    )
