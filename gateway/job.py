"""What the journey has decided of a request by the time it is generated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from adapters.registry import Lease
from budgeting.values import Plan
from gateway.backends.port import Backend, Feature, features_asked
from gateway.contracts.values import Contract, GenerateRequest
from gateway.routing.target import Target

Shorten = Callable[[Plan], Awaitable[Plan | None]]


@dataclass(frozen=True, slots=True)
class Job:
    """One request, planned, leased and ranked.

    ``shorten`` makes a plan of half the length out of a plan, or ``None`` where nothing more can be cut.
    """

    request: GenerateRequest
    target: Target
    plan: Plan
    lease: Lease
    primary: Backend
    shorten: Shorten

    @property
    def must_honour(self) -> frozenset[Feature]:
        """The features that whoever answers must have."""
        return must_honour(self.request, self.lease)


def must_honour(request: GenerateRequest, lease: Lease) -> frozenset[Feature]:
    """The features a backend must have to get this request at all.

    In the native contract sampling hints may be dropped with a warning; in OpenAI's nothing may.
    """
    asked = features_asked(request.sampling, request.response_format)
    if request.contract is Contract.NATIVE:
        asked &= {Feature.RESPONSE_FORMAT}
    if request.raw_prompt is not None:
        asked |= {Feature.RAW_PROMPT}
    if lease.adapter is not None:
        asked |= {Feature.LORA}
    return asked
