"""The job: a request with all decisions that the journey made before generation."""

from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct, field
from msgspec.structs import replace

from adapters.selection import Lease
from admission.errors import Refused
from budgeting.errors import BudgetError
from budgeting.values import Plan
from gateway.backends.lora_slots import PARAM
from gateway.backends.port import Backend, Fleet
from gateway.backends.sampling import features_asked
from gateway.contracts.features import Feature
from gateway.contracts.images import ImageData
from gateway.contracts.values import NATIVE, TEXT, GenerateRequest
from gateway.errors import BackendUnavailable
from gateway.generation.answer_stream import AnswerStream
from gateway.prompts.budgets import Planning
from gateway.routing.rank import Ranking, lacking, rank
from gateway.routing.target import RETRY_MS, Target
from resilience.failures import BackendFailure
from resilience.fallback_policy import DEGRADED, RESPONSE_CACHE
from resilience.retry_budget import CallBudget

# The most time before a deadline that is reserved for a stored answer or the degraded text.
FALLBACK_RESERVE_S = 0.05
MAX_CHAINS = 256  # the most cached fallback chains without stored and degraded texts
FALLBACK_RESERVE_SHARE = 0.1  # the largest share of the time to a deadline that is reserved


class Job(Struct, frozen=True):
    """One request with its plan, adapter lease and primary backend.

    ``plan`` is for the model ``planned_for``, by default the primary's; ``planning`` makes a plan for another
    model. Without ``planning`` the plan is never changed. ``call_budget`` limits the request's calls to
    servers. ``drawn`` is the backend that was drawn by the route's weights, as in the ranking. ``images`` has
    the images' bytes by SHA-256, which the plan's messages contain.
    """

    request: GenerateRequest
    target: Target
    plan: Plan
    lease: Lease
    primary: Backend
    planning: Planning | None = None
    call_budget: CallBudget = field(default_factory=CallBudget)
    drawn: str | None = None
    planned_for: str | None = None
    images: Mapping[str, ImageData] = {}

    @property
    def plan_model(self) -> str:
        return self.primary.model if self.planned_for is None else self.planned_for

    def plan_holds(self, model: str) -> bool:
        """Whether a plan for ``model`` is valid for this job's model, and vice versa."""
        return self.planning is None or self.planning.alike(model, self.plan_model)

    async def planned_on(self, backend: Backend) -> "Job | None":
        """Return the job planned for ``backend``; ``None`` if its model cannot take the prompt."""
        if self.planning is None or self.plan_holds(backend.model):
            return self
        if isinstance(self.planning.asked.prompt.raw, tuple):
            return None  # token ids are valid for one model only
        try:
            plan = await self.planning.plan(backend.model)
        except BudgetError:
            return None
        return replace(self, plan=plan, planned_for=backend.model)

    async def half_plan(self) -> Plan | None:
        """Plan the prompt in half the tokens of the plan; ``None`` if nothing more can be cut."""
        return None if self.planning is None else await self.planning.half(self.plan_model, self.plan)

    def lacking(self, backend: Backend) -> frozenset[Feature]:
        """What a backend lacks of what this request asks."""
        return lacking(required_features(self.request, self.lease), self.lease.adapter, backend)

    def served_model(self, backend: Backend) -> str:
        """Return the id of the answering model on ``backend``: the adapter's, else the base model's."""
        return self.lease.adapter_id or backend.model

    @property
    def deadline(self) -> float:
        """When the answer ends, complete or not: the caller's deadline, else that of the route's timeout."""
        request = self.request
        if request.deadline is not None:
            return request.deadline
        return request.arrived_at + self.target.route.config.timeout_ms / 1000

    @property
    def fallback(self) -> tuple[str, ...]:
        """The fallback targets of the route that this request may use.

        No cached answer is a tool call, and the degraded text has no structure that a request asks for.
        """
        request, route = self.request, self.target.route
        if not request.allow_fallback:
            return ()
        contract = "native" if request.contract is NATIVE else "openai"
        if contract not in route.config.fallback_text_in or request.must_call:
            return _without(route.fallback, (RESPONSE_CACHE, DEGRADED))
        if request.response_format.type is not TEXT:
            return _without(route.fallback, (DEGRADED,))
        return route.fallback

    def has_fallback_beside(self, backend: str) -> bool:
        """Whether another backend is a fallback target of this request."""
        return any(leg not in (RESPONSE_CACHE, DEGRADED, backend) for leg in self.fallback)

    @property
    def fallback_reserve_s(self) -> float:
        """Seconds before the deadline that are reserved for a fallback text; 0 without a degraded text."""
        if DEGRADED not in self.target.route.fallback or DEGRADED not in self.fallback:
            return 0.0
        whole_s = self.deadline - self.request.arrived_at
        return min(FALLBACK_RESERVE_S, max(0.0, whole_s * FALLBACK_RESERVE_SHARE))


@lru_cache(MAX_CHAINS)
def _without(chain: tuple[str, ...], legs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(leg for leg in chain if leg not in legs)


def required_features(request: GenerateRequest, lease: Lease) -> frozenset[Feature]:
    """Return the features that a backend must have to get this request.

    In the native contract sampling hints may be dropped with a warning; in OpenAI's they may not.
    """
    asked = features_asked(request.sampling, request.response_format)
    if request.contract is NATIVE:
        asked &= {Feature.RESPONSE_FORMAT}
    if request.raw_prompt is not None:
        asked |= {Feature.RAW_PROMPT}
    if lease.adapter is not None:
        asked |= {Feature.LORA}
    return asked | request.needs


def rank_backends(request: GenerateRequest, target: Target, lease: Lease, fleet: Fleet) -> Ranking:
    """Raises as :func:`rank`; BackendUnavailable if a pool has lost a model since ``target`` was resolved."""
    try:
        return rank(
            target.route,
            sticky_key=request.sticky_key,
            asked=required_features(request, lease),
            backends=fleet.backends,
            pinned=target.backend,
            model=target.model or (lease.adapter.base_model if lease.adapter is not None else None),
            models=request.caller.models,
            serving=target.serving,
            adapter=lease.adapter,
        )
    except KeyError as gone:
        if gone.args[0] in fleet.backends:
            raise
        raise BackendUnavailable(
            f"the models of route {target.route.name!r} changed meanwhile; send the request again",
            retry_after_ms=RETRY_MS,
        ) from None


def without_adapter(cause: Refused | BackendFailure, job: Job, stream: AnswerStream) -> Job | None:
    """Return the job without its adapter; ``None`` if that is not allowed, or the adapter did not fail.

    The route must allow it (``adapter_fallback: base``). The caller must accept fallbacks, and must have no
    part of the adapter's answer.
    """
    if not isinstance(cause, BackendFailure) or cause.param != PARAM or job.lease.adapter is None:
        return None
    allowed = job.target.route.config.adapter_fallback == "base" and job.request.allow_fallback
    if not allowed or stream.committed:
        return None
    return replace(job, lease=Lease(None, "base"))


def replanning_warning(before: Job, after: Job) -> tuple[str, ...]:
    """Return the warning for the caller about what the plan for another model additionally cut."""
    old, new = before.plan, after.plan
    turns = new.dropped_turns - old.dropped_turns
    chunks = len(new.dropped_chunks) + len(new.cut_chunks) - len(old.dropped_chunks) - len(old.cut_chunks)
    if old is new or (turns <= 0 and chunks <= 0):
        return ()
    return (
        f"the prompt was planned again for {after.plan_model}, which takes less:"
        f" {max(0, turns)} more turns and {max(0, chunks)} more chunks were cut",
    )


def warning_of(job: Job, cause: Refused | BackendFailure) -> str:
    """Return the warning for the caller that the base model answered instead of the adapter."""
    reason = cause.kind.value if isinstance(cause, BackendFailure) else cause.reason.value
    return f"adapter {job.lease.adapter_id} could not be used ({reason}); the base model answered"
