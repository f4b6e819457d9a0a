"""The stages of a request, in order, one call a stage::

    HTTP → value → canonicalize → lease adapter → rank backends → plan budget → admit
         → generate, guarded → respond → account

The journey is a coroutine that pushes into a sink, so a slow reader only slows its own request. If a caller
disconnects, one cancellation unwinds the frames that hold slot, lease and sequence, and each is released.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from accounting.account import Accounts
from adapters.registry import AdapterRegistry
from admission.controller import AdmissionController
from admission.errors import Refused
from budgeting.plan import Offload
from gateway.backends.port import Fleet
from gateway.contracts.answer import Answer
from gateway.contracts.values import GenerateRequest
from gateway.errors import public_error
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.demand import demand_of
from gateway.generation.dispatcher import Dispatcher, GenerationOutcome
from gateway.generation.fallback import FallbackChain
from gateway.generation.grammars import CheckShape
from gateway.generation.job import Job, rank_backends
from gateway.generation.sink import Accept, Sink, nothing
from gateway.images.reading import ImageReader
from gateway.keys.rate_limits import KeyLimiter, Settling, paying
from gateway.prompts.budgets import Planning, budget_request
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.prefixes import PrefixWatch
from gateway.prompts.text import Models
from gateway.prompts.versions import PromptVersions
from gateway.requests.answer import (
    closing_row,
    estimated_cost,
    opening_row,
    partial_usage,
    respond,
    warnings_of,
)
from gateway.requests.in_flight import InFlightRequests
from gateway.requests.request_record import Reporter, RequestRecorder
from gateway.requests.timing import StageTimer
from gateway.routing.revision import Revision
from gateway.routing.target import resolve
from resilience.errors import DeadlinePassed
from resilience.failures import BackendFailure
from resilience.time_limits import TimeLimit
from resilience.turns import Turns, Urgent


@dataclass(frozen=True, slots=True)
class Journey:
    """Runs the stages of a request in order; ``time_limit`` applies to all of them together."""

    in_flight: InFlightRequests
    revision: Callable[[], Revision]
    versions: PromptVersions
    canonicalizer: Canonicalizer
    models: Models
    offload: Callable[[GenerateRequest], Offload]
    adapters: AdapterRegistry
    fleet: Fleet
    images: ImageReader
    prefixes: PrefixWatch
    admission: AdmissionController
    dispatcher: Dispatcher
    fallback: FallbackChain
    accounts: Accounts
    limiter: KeyLimiter
    turns: Turns
    reporter: Reporter
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    time_limit: Callable[[], TimeLimit]
    check_shape: CheckShape
    mirror: Callable[[Job, GenerationOutcome, Answer], None] = lambda job, outcome, answer: None

    async def run(self, request: GenerateRequest, sink: Sink, accept: Accept = nothing) -> None:
        """Run one request to its end; every failure but cancellation reaches ``sink.fail``."""
        span = self.reporter.trace(request)
        stream = AnswerStream(request, sink, self.clock, span)
        timer = StageTimer(self.clock, request.arrived_at, self.time_limit())
        with RequestRecorder(self.reporter, request, span, stream, timer) as recorder:
            try:
                with self.in_flight.receive(request), timer.limit, self.turns.urgent() as urgent:
                    await self._stages(request, span.trace_id, sink, stream, timer, recorder, urgent, accept)
                await urgent.next_turn()  # the caller has the answer; the record may wait
            except Exception as error:
                public = request.in_body_terms(public_error(timer.cause_of(error)))
                recorder.failed(public, error)
                with self.in_flight.reporting():
                    await self.accounts.durable_if_possible()  # what was delivered is billed before the error
                    await sink.fail(public)

    async def _stages(
        self,
        request: GenerateRequest,
        trace_id: str,
        sink: Sink,
        stream: AnswerStream,
        timer: StageTimer,
        recorder: RequestRecorder,
        urgent: Urgent,
        accept: Accept,
    ) -> None:
        await urgent.next_turn()
        revision, ended_at = self.revision(), timer.ended_at
        target = resolve(request, revision, self.fleet, self.adapters)
        version = self.versions.get(target.prompt_version) if target.prompt_version else None
        recorder.found(target, revision)
        offload = self.offload(request)
        canonical = await self.canonicalizer.canonical_async(request, version, offload)
        recorder.canonicalized(canonical)
        ended_at["canonicalize"] = self.clock()

        with self.adapters.lease(target.selection(request)) as lease, self.images.of(request) as images:
            ended_at["adapter"] = self.clock()
            ranked = rank_backends(request, target, lease, self.fleet)
            request = await self.check_shape(request)
            backend = ranked.first((*request.extra, *request.dropped))
            ended_at["rank"] = self.clock()

            prompt = await images.read(canonical.prompt, offload)
            planning = Planning(self.models, budget_request(request, prompt, version, target.route), offload)
            plan = await planning.plan(backend.model)
            prefix = self.prefixes.expect(plan, backend, request.caller.cache_salt, lease.adapter_id)
            recorder.prepared(plan, lease, ranked.drawn, prefix)
            ended_at["budget"] = self.clock()
            await urgent.next_turn()
            job = Job(request, target, plan, lease, backend, planning, drawn=ranked.drawn, images=images.data)
            demand = demand_of(job, backend, stream, prefix)
            row = opening_row(job, revision.number, trace_id, self.unix_time())
            so_far = partial(partial_usage, row, stream, timer)
            expected = self.admission.expected_output(demand)
            cost = partial(estimated_cost, row, backend, demand.input_tokens, expected, self.accounts.price)
            urgent.end()  # the request may wait now
            held = demand.input_tokens + expected
            reservation = await self.limiter.reserve(request.caller, held, cost, backend.model)
            with (
                Settling(reservation, stream) as tokens,
                self.accounts.open(row, so_far, paying(reservation, recorder.billed)) as account,
            ):
                accept()
                try:
                    async with self.admission.admit(demand) as slot:
                        ended_at["admit"] = self.clock()
                        outcome = await self.dispatcher.generate(slot, backend, job, stream)
                except (Refused, BackendFailure, DeadlinePassed) as cause:
                    outcome = await self.fallback.answer(cause, job, stream)
                ended_at["generate"] = self.clock()
                await urgent.next_turn()
                warnings = warnings_of(request, canonical, lease)
                answer = respond(request, outcome, stream, timer, trace_id=trace_id, warnings=warnings)
                account.settle(closing_row(row, answer, model=outcome.model))
                self.fallback.remember(job, outcome, answer, stream)
                if tokens is not None:
                    tokens.settle(answer.usage.input_tokens + answer.usage.output_tokens)
                recorder.answered(answer, outcome.plan)
                self.prefixes.answered(prefix, answer.backend_name)
                await urgent.next_turn()
                await self.accounts.durable()
                await sink.finish(answer)
                ended_at["respond"] = self.clock()
                self.mirror(job, outcome, answer)
