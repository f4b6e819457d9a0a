"""Compares policies: measure the capacity, tune each policy on one half of a trace, run the other half.

The arguments determine all results, so that runs can be spread over processes and repeated.
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

# Capacity is the highest arrival rate at which this share of requests meets the SLO without admission.
CAPACITY_ATTAINMENT = 0.95
# Number of bisection steps; from a range of 64, the last one halves a step of 7 %.
CAPACITY_STEPS = 9


class Kind(StrEnum):
    """What is in front of the worker."""

    NONE = "none"
    VLLM = "vLLM's bounds"
    THRESHOLDS = "static thresholds"
    SLUICE = "sluice"


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy with its parameters.

    Args:
        by_priority: the engine's queue is ordered by priority; only vLLM's bounds may set it.
        max_requests, max_tokens: vLLM's bounds.
        limits: the gate's thresholds, or the static ones.
    """

    kind: Kind
    by_priority: bool = False
    max_requests: int | None = None
    max_tokens: int | None = None
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)

    @property
    def label(self) -> str:
        """Return the tuned parameters as text."""
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
    """One run of these requests at ``rate`` requests per second on average."""

    requests: Sequence[Arrival]
    rate: float
    profile: Profile
    slo: SimulatedSlo
    setting: Setting


def run(job: SimulationJob) -> RunSummary:
    """Run the job, and return its figures."""
    profile = replace(job.profile, by_priority=job.setting.by_priority)
    arrivals = paced(job.requests, job.rate / rate_of(job.requests))
    return summarize(simulate(arrivals, profile, lambda worker: job.setting.policy(worker)), job.slo)


def capacity(requests: Sequence[Arrival], profile: Profile, slo: SimulatedSlo) -> float:
    """Return the highest rate that the worker sustains without admission, in requests per second.

    It sustains a rate at which at least ``CAPACITY_ATTAINMENT`` of the requests meet the SLO.
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
    """Return the settings that are tried for a policy's free parameters.

    vLLM's documentation computes the bound on tokens as TTFT target times prefill rate. That bound and parts
    of it are tried with both of vLLM's scheduling policies, and bounds on requests up to twice the batch. The
    gate has the shipped defaults.
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
    """Return the setting with the most goodput over the loads that it was tried at; of equals the first."""
    return max(zip(settings, goodput, strict=True), key=lambda tried: sum(tried[1]))[0]
