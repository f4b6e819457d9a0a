"""What the journey has decided of a request by the time it is generated."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from adapters.selection import Lease
from admission.errors import Refused
from budgeting.values import Plan
from gateway.backends.lora_slots import PARAM
from gateway.backends.port import Backend, Fleet, features_asked
from gateway.contracts.features import Feature
from gateway.contracts.values import Contract, GenerateRequest
from gateway.generation.answer_stream import AnswerStream
from gateway.routing.rank import Ranking, rank
from gateway.routing.target import Target
from resilience.failures import BackendFailure
from resilience.fallback_policy import DEGRADED, RESPONSE_CACHE
from resilience.retry_budget import CallBudget

# The most time before a deadline that is reserved for a stored answer or the degraded text.
FALLBACK_RESERVE_S = 0.05
# The most of the whole time to a deadline that is reserved.
FALLBACK_RESERVE_SHARE = 0.1

Shorten = Callable[[Plan], Awaitable[Plan | None]]


@dataclass(frozen=True, slots=True)
class Job:
    """One request, planned, leased and ranked.

    ``shorten`` makes a plan of half the length out of a plan, or ``None`` where nothing more can be cut.
    ``call_budget`` bounds the calls to servers that the request causes. ``drawn`` is the backend that the
    route's weights gave the request, as in the ranking.
    """

    request: GenerateRequest
    target: Target
    plan: Plan
    lease: Lease
    primary: Backend
    shorten: Shorten
    call_budget: CallBudget = field(default_factory=CallBudget)
    drawn: str | None = None

    @property
    def required_features(self) -> frozenset[Feature]:
        """The features that a backend must have to answer."""
        return required_features(self.request, self.lease)

    def served_model(self, backend: Backend) -> str:
        """The id of what answers on ``backend``: the adapter's, else the base model's."""
        adapter = self.lease.adapter
        return backend.model if adapter is None else adapter.adapter_id

    @property
    def deadline(self) -> float:
        """When the answer ends with what there is: the caller's deadline, else the route's time."""
        request = self.request
        return (
            request.arrived_at + self.target.route.timeout_s if request.deadline is None else request.deadline
        )

    @property
    def fallback(self) -> tuple[str, ...]:
        """The legs of the route's chain that this request may get."""
        request, route = self.request, self.target.route
        if not request.allow_fallback:
            return ()
        contract = "native" if request.contract is Contract.NATIVE else "openai"
        if contract in route.fallback_text_in:
            return route.fallback
        return tuple(leg for leg in route.fallback if leg not in (RESPONSE_CACHE, DEGRADED))

    @property
    def fallback_reserve_s(self) -> float:
        """Seconds before the deadline that are reserved for the degraded text; 0 where there is none."""
        if DEGRADED not in self.fallback:
            return 0.0
        whole_s = self.deadline - self.request.arrived_at
        return min(FALLBACK_RESERVE_S, max(0.0, whole_s * FALLBACK_RESERVE_SHARE))

    @property
    def first_token_deadline(self) -> float:
        """When the first token must be there, or a fallback answers instead; on the request's clock."""
        return self.deadline - self.fallback_reserve_s


def required_features(request: GenerateRequest, lease: Lease) -> frozenset[Feature]:
    """The features a backend must have to get this request.

    In the native contract sampling hints may be dropped with a warning; in OpenAI's nothing may.
    """
    asked = features_asked(request.sampling, request.response_format)
    if request.contract is Contract.NATIVE:
        asked &= {Feature.RESPONSE_FORMAT}
    if request.raw_prompt is not None:
        asked |= {Feature.RAW_PROMPT}
    if lease.adapter is not None:
        asked |= {Feature.LORA}
    return asked | request.needs


def rank_backends(request: GenerateRequest, target: Target, lease: Lease, fleet: Fleet) -> Ranking:
    """The route's backends in the order in which the request may get them."""
    return rank(
        target.route,
        sticky_key=request.sticky_key,
        asked=required_features(request, lease),
        backends=fleet.backends,
        pinned=target.backend,
        model=target.model or (lease.adapter.base_model if lease.adapter is not None else None),
    )


def without_adapter(cause: Refused | BackendFailure, job: Job, stream: AnswerStream) -> Job | None:
    """The same job for the base model; ``None`` where that is not allowed, or not what failed.

    The route must allow it (``adapter_fallback: base``). The caller must accept fallbacks, and must have
    nothing of the adapter's answer.
    """
    if not isinstance(cause, BackendFailure) or cause.param != PARAM or job.lease.adapter is None:
        return None
    if not job.target.route.adapter_fallback or not job.request.allow_fallback or stream.committed:
        return None
    return replace(job, lease=Lease(None, "base"))


def warning_of(job: Job, cause: Refused | BackendFailure) -> str:
    """The warning for the caller."""
    adapter = job.lease.adapter
    name = adapter.adapter_id if adapter is not None else "none"
    reason = cause.kind.value if isinstance(cause, BackendFailure) else cause.reason.value
    return f"adapter {name} could not be used ({reason}); the base model answered"
