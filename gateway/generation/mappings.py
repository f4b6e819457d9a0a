"""Small pure mappings between the journey's values and those that each stage takes."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from adapters.values import Selection
from admission.values import AdmissionLimits, Demand
from budgeting.errors import BudgetError
from budgeting.plan import BudgetPlanner
from budgeting.values import BudgetRequest, CanonicalPrompt, Plan
from gateway.backends.port import Backend
from gateway.contracts.features import Feature
from gateway.contracts.values import (
    CallerRole,
    GenerateRequest,
)
from gateway.errors import InvalidRequest
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.job import Job, Shorten
from gateway.prompts import budgets
from gateway.prompts.prefixes import Prefix
from gateway.prompts.versions import PromptVersion
from gateway.routing.rank import Ranking
from gateway.routing.route_budgets import NO_ROUTE_BUDGETS, RouteBudgets
from gateway.routing.target import Target

# What a waiting request keeps in memory: its text twice, its token ids, and what hangs on them; measured on
# prompts of 3,600 tokens, rounded up.
BYTES_PER_TOKEN = 64


def budget_request(
    request: GenerateRequest,
    prompt: CanonicalPrompt,
    version: PromptVersion | None,
    route: RouteBudgets = NO_ROUTE_BUDGETS,
) -> BudgetRequest:
    """What the planner is asked."""
    return budgets.budget_request(
        prompt, max_tokens=request.sampling.max_tokens, version=version, route=route
    )


def selection_of(request: GenerateRequest, target: Target) -> Selection:
    """What adapter selection looks at."""
    fields = {"tenant": request.caller.tenant, "locale": request.locale, "intent": request.intent}
    return Selection(
        target.adapter_id,
        target.route.adapter_rules,
        MappingProxyType({name: value for name, value in fields.items() if value is not None}),
        sticky_key=request.session_id or request.generation_id,
        allowed=request.caller.adapters,
        operator=request.caller.role is not CallerRole.CALLER,
        or_base=target.route.adapter_fallback and request.allow_fallback,
    )


def first_candidate(ranking: Ranking) -> Backend:
    """The backend to try first.

    Raises:
        InvalidRequest: no backend of the route can honour a field of the request; names it.
    """
    if ranking.candidates:
        return ranking.candidates[0]
    lacking = sorted({feature.value for lack in ranking.unable.values() for feature in lack})
    raise InvalidRequest(
        f"no backend of this route supports {', '.join(lacking)}; leave it out or choose another route",
        param=Feature(lacking[0]).field if lacking else None,
    )


def demand_of(job: Job, backend: Backend, stream: AnswerStream, prefix: Prefix | None = None) -> Demand:
    """What the request asks of its backend; the stream tells admission how far its answer is.

    A prefix that the backend has not computed to its end bounds what it can find of the prompt; what it finds
    beyond a known prefix is learned.
    """
    request, plan, route = job.request, job.plan, job.target.route
    bound = prefix is not None and prefix.backend == backend.name and prefix.expected < prefix.tokens
    limits = route.limits
    if limits is not None and plan.counts.total > limits.max_input_tokens:
        # The planner has cut what may be cut; the rest fits the model, and may pass.
        limits = replace(limits, max_input_tokens=plan.counts.total)
    return Demand(
        backend=backend.name,
        tenant=request.caller.tenant,
        priority=request.priority,
        input_tokens=plan.counts.total,
        max_output_tokens=plan.generation_reserve * request.sampling.n,
        arrived_at=request.arrived_at,
        deadline=request.deadline,
        kind=(route.name, request.intent),
        cached_tokens=prefix.expected if bound and prefix is not None else None,
        size_bytes=BYTES_PER_TOKEN * plan.counts.total,
        produced=stream.produced,
        limits=limits,
        sequences=request.sampling.n,
    )


def readmission_demand(demand: Demand, job: Job, begun: int, stream: AnswerStream, now: float) -> Demand:
    """The same for a request that was let in once, with ``begun`` tokens of its answer: it waits before new
    ones, in the urgent class, as long as the route waits for a restart; and no queue shortens it.
    """
    limits = demand.limits or AdmissionLimits()
    wait_s = job.target.route.resume.max_wait_s
    if job.request.deadline is not None:
        wait_s = min(wait_s, job.request.deadline - now)
    input_tokens = demand.input_tokens + begun
    return replace(
        demand,
        priority=max(demand.priority, 1),
        input_tokens=input_tokens,
        max_output_tokens=max(1, demand.max_output_tokens - begun),
        deadline=None,
        # The length of a rest says nothing about whole answers.
        kind=(job.target.route.name, None, "rest") if begun else demand.kind,
        cached_tokens=None,
        produced=lambda: max(0, stream.tokens - begun),
        limits=replace(
            limits,
            max_wait_s=max(wait_s, 0.001),
            max_input_tokens=max(limits.max_input_tokens, input_tokens),
            max_queue=2 * limits.max_queue,
            rungs=(),
        ),
    )


def shortening(planner: BudgetPlanner, asked: BudgetRequest) -> Shorten:
    """Plans the same prompt in half the tokens."""

    async def shorten(plan: Plan) -> Plan | None:
        try:
            half = await planner.plan_async(replace(asked, max_input_tokens=plan.counts.total // 2))
        except BudgetError:
            return None
        return half if half.counts.total < plan.counts.total else None

    return shorten
