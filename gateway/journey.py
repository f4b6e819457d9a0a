"""A request's whole way, in order, one call a stage.

::

    HTTP → value → canonicalize → plan budget → lease adapter → rank backends → admit
         → generate, guarded → respond → account

The journey is a coroutine that pushes into a sink. A slow reader therefore holds back its own request
only, and when a caller goes away the one cancellation runs through the very frames that hold the slot,
the lease and the sequence, so each is given back before the request has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from accounting.account import Accounts
from adapters.registry import AdapterRegistry
from admission.controller import AdmissionController
from admission.errors import Refused
from budgeting.plan import BudgetPlanner
from gateway.backends.fleet import Fleet
from gateway.contracts.values import GenerateRequest
from gateway.errors import Internal, public_error
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.dispatcher import Dispatcher
from gateway.generation.fallback import FallbackChain
from gateway.generation.job import Job, must_honour
from gateway.generation.mappings import budget_request, demand_of, first_candidate, selection_of, shortening
from gateway.generation.sink import Sink
from gateway.keys.rate_limits import KeyLimiter, settling
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.versions import PromptVersions
from gateway.requests.answer import opening_row, respond
from gateway.requests.in_flight import InFlightRequests, StageTimer
from gateway.requests.request_record import Reporter, RequestRecorder, closing_row
from gateway.requests.time_limit import in_time
from gateway.routing.rank import rank
from gateway.routing.revision import Revision
from gateway.routing.target import resolve
from gateway.shadow.port import Mirrors, NoShadow
from resilience.errors import DeadlinePassed
from resilience.failures import BackendFailure


@dataclass(frozen=True, slots=True)
class Journey:
    """Every stage, in the order in which a request meets them; ``timeout_s`` is for all of them together."""

    reception: InFlightRequests
    revision: Callable[[], Revision]
    versions: PromptVersions
    canonicalizer: Canonicalizer
    planner: Callable[[], BudgetPlanner]
    adapters: AdapterRegistry
    fleet: Fleet
    admission: AdmissionController
    dispatcher: Dispatcher
    fallback: FallbackChain
    accounts: Accounts
    limiter: KeyLimiter
    reporter: Reporter
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    shadow: Mirrors = field(default_factory=NoShadow)
    timeout_s: float = 300.0

    async def run(self, request: GenerateRequest, sink: Sink) -> None:
        """Run one request to its end; every failure but cancellation reaches ``sink.fail``."""
        stream = AnswerStream(sink, self.clock, streamed=request.stream)
        trip = self.reporter.begin(request, stream, StageTimer(self.clock, request.arrived_at))
        try:
            with self.reception.receive(request):
                async with in_time(self.timeout_s, trip):
                    await self._travel(request, sink, stream, trip)
        except asyncio.CancelledError:
            trip.cancelled()
            raise
        except Exception as error:
            public = public_error(error)
            if public.code == Internal.code:
                self.reporter.defect(trip, error)
            trip.failed(public)
            with self.reception.telling():
                # What was delivered up to here is billed; without a journal the error goes out all the same.
                await self.accounts.durable_if_it_can_be()
                await sink.fail(public, request_id=request.request_id, trace_id=trip.trace_id)
        finally:
            self.reporter.end(trip)

    async def _travel(
        self, request: GenerateRequest, sink: Sink, stream: AnswerStream, trip: RequestRecorder
    ) -> None:
        revision = self.revision()
        target = resolve(request, revision, self.fleet, self.adapters.ids)
        version = self.versions.get(target.prompt_version) if target.prompt_version else None
        trip.found(target, revision)

        canonical = await self.canonicalizer.canonical_async(request, version)
        trip.canonicalized(canonical)
        trip.timer.lap("canonicalize")

        planner = self.planner()
        asked = budget_request(request, canonical.prompt, version, target.route.budgets)
        plan = await planner.plan_async(asked)
        trip.planned(plan)
        trip.timer.lap("budget")

        with self.adapters.lease(selection_of(request, target)) as lease:
            trip.leased(lease)
            trip.timer.lap("adapter")

            ranking = rank(
                target.route,
                sticky_key=request.session_id or request.generation_id,
                asked=must_honour(request, lease),
                backends=self.fleet.backends,
                pinned=target.backend,
            )
            trip.drew(ranking)
            backend = first_candidate(ranking)
            trip.bound(backend)
            trip.timer.lap("rank")

            row = opening_row(request, trip, unix_time=self.unix_time())
            job = Job(request, target, plan, lease, backend, shortening(planner, asked))
            demand = demand_of(job, backend, stream, trip.prefix)
            held = await self.limiter.reserve(request, demand.input_tokens, demand.max_output_tokens)
            with (
                settling(held, demand.input_tokens, stream) as tokens,
                self.accounts.open(row) as account,
                trip.billing(account, row),
            ):
                try:
                    async with self.admission.admit(demand) as slot:
                        trip.timer.lap("admit")
                        outcome = await self.dispatcher.generate(slot, backend, job, stream)
                except (Refused, BackendFailure, DeadlinePassed) as cause:
                    outcome = await self.fallback.answer(cause, job, stream)
                trip.planned(outcome.plan)
                trip.timer.lap("generate")

                answer = respond(request, outcome, trip, now=self.clock())
                self.fallback.remember(job, outcome, answer)
                account.settle(closing_row(row, answer, model=outcome.model))
                if tokens is not None:
                    tokens.settle(answer.usage.input_tokens + answer.usage.output_tokens)
                trip.answered(answer)
                await self.accounts.durable()
                await sink.finish(answer)
                trip.timer.lap("respond")
                self.shadow.mirror(job, outcome, answer)
