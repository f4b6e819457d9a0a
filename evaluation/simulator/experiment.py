"""Policies compared: capacity first, then each one's parameters tuned on one half of a trace, then the other.

Everything is decided by the arguments, so that runs can be spread over processes and repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from admission.values import AdmissionLimits
from evaluation.simulator.measures import RunSummary, SimulatedSlo, summarize
from evaluation.simulator.policies import EngineBounds, GatePolicy, Open, Policy, StaticThresholds
from evaluation.simulator.run import simulate
from evaluation.simulator.values import Arrival, Profile
from evaluation.simulator.worker import SimulatedWorker
from evaluation.simulator.workload import paced, rate_of

# Capacity: the highest arrival rate at which so many requests meet the SLO without admission.
CAPACITY_ATTAINMENT = 0.95
# Bisection steps for it; from a range of 64, the last one halves a step of 7 %.
CAPACITY_STEPS = 9


class Kind(StrEnum):
    """What stands in front of the worker."""

    NONE = "none"
    VLLM = "vLLM's bounds"
    THRESHOLDS = "static thresholds"
    SLUICE = "sluice"


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy with its parameters.

    Args:
        by_priority: the engine's queue goes by priority; only vLLM's bounds may choose.
        max_requests, max_tokens: vLLM's bounds.
        limits: the gate's thresholds, or the static ones.
    """

    kind: Kind
    by_priority: bool = False
    max_requests: int | None = None
    max_tokens: int | None = None
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)

    @property
    def told(self) -> str:
        """The parameters that were free, in words."""
        if self.kind is Kind.VLLM:
            bound = (
                f"max_num_queued_reqs {self.max_requests}"
                if self.max_requests is not None
                else f"max_num_queued_tokens {self.max_tokens}"
            )
            return f"{bound}, scheduling {'priority' if self.by_priority else 'fcfs'}"
        return "" if self.kind is Kind.NONE else "as shipped"

    def policy(self, worker: SimulatedWorker) -> Policy:
        """The policy in front of a worker."""
        match self.kind:
            case Kind.NONE:
                return Open()
            case Kind.VLLM:
                return EngineBounds(max_requests=self.max_requests, max_tokens=self.max_tokens)
            case Kind.THRESHOLDS:
                return StaticThresholds()
            case Kind.SLUICE:
                return GatePolicy(self.limits, produced=worker.produced)


@dataclass(frozen=True, slots=True)
class SimulationJob:
    """One run: these requests, ``rate`` of them a second on average."""

    requests: Sequence[Arrival]
    rate: float
    profile: Profile
    slo: SimulatedSlo
    setting: Setting


def run(job: SimulationJob) -> RunSummary:
    """Do it."""
    profile = replace(job.profile, by_priority=job.setting.by_priority)
    arrivals = paced(job.requests, job.rate / rate_of(job.requests))
    return summarize(simulate(arrivals, profile, lambda worker: job.setting.policy(worker)), job.slo)


def capacity(requests: Sequence[Arrival], profile: Profile, slo: SimulatedSlo) -> float:
    """The highest rate that the worker sustains without admission, requests a second.

    Sustains: at least ``CAPACITY_ATTAINMENT`` of the requests meet the SLO.
    """
    mean = sum(one.prompt for one in requests) / len(requests)
    high = 2.0 / profile.step_s(round(mean), 0, 0)  # prefill alone would not keep up with half of this
    low = high / 64
    for _ in range(CAPACITY_STEPS):
        middle = (low * high) ** 0.5
        reached = run(SimulationJob(requests, middle, profile, slo, Setting(Kind.NONE))).attainment
        low, high = (middle, high) if reached >= CAPACITY_ATTAINMENT else (low, middle)
    return low


def candidates(kind: Kind, profile: Profile, slo: SimulatedSlo, *, few: bool = False) -> list[Setting]:
    """The settings of a policy's free parameters that are tried.

    vLLM's documentation sizes the bound on tokens as the TTFT target times the prefill rate: that, and parts
    of it, with both of its scheduling policies; and bounds on requests up to twice the batch. The gate has
    the shipped defaults.
    """
    if kind is Kind.VLLM:
        whole = slo.ttft_s / profile.prefill_s
        parts = (0.5,) if few else (0.15, 0.3, 0.5, 0.75, 1.0)
        by_tokens = [
            Setting(kind, by_priority=urgent, max_tokens=round(part * whole))
            for part in parts
            for urgent in (False, True)
        ]
        shares = (0.5,) if few else (0.125, 0.25, 0.5, 0.75, 1.0, 2.0)
        return by_tokens + [
            Setting(kind, by_priority=True, max_requests=round(share * profile.max_num_seqs))
            for share in shares
        ]
    return [Setting(kind)]  # the gate's and the static thresholds as shipped


def best(settings: Sequence[Setting], goodput: Sequence[Sequence[float]]) -> Setting:
    """The setting with the most goodput, summed over the loads it was tried at; of equals the first."""
    return max(zip(settings, goodput, strict=True), key=lambda tried: sum(tried[1]))[0]
