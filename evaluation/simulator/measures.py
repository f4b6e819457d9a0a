"""The figures of a run: goodput, latency, preemptions, waste, fairness."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.simulator.values import SimulatedRequest

# Output counts twice in a tenant's service, as at the gate: each output token occupies the engine for a step.
OUTPUT_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class SimulatedSlo:
    """The targets of an answer: seconds to the first token from arrival, mean seconds between tokens."""

    ttft_s: float
    tpot_s: float

    def met_by(self, outcome: SimulatedRequest) -> bool:
        """Return whether the answer was complete and in time."""
        ttft_s, tpot_s = outcome.ttft_s, outcome.tpot_s
        return ttft_s is not None and tpot_s is not None and ttft_s <= self.ttft_s and tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The figures of one run.

    Args:
        goodput: requests that met the SLO, per second of the trace.
        attainment: share of all requests that met it; ``by_priority`` the same for each priority.
        ttft_p50_s, ttft_p99_s: of the answered requests, from arrival.
        wasted: share of the computed tokens (prompts and answers) used for requests that missed the SLO.
        fairness: Jain's index over tenants of each one's service relative to its fair share.
        shrunk: share of the answered requests whose answer was shortened.
    """

    requests: int
    answered: int
    goodput: float
    attainment: float
    by_priority: Mapping[int, float]
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    preemptions: int
    wasted: float
    fairness: float
    shrunk: float


def summarize(outcomes: Sequence[SimulatedRequest], slo: SimulatedSlo) -> RunSummary:
    """The figures of a run of at least one request."""
    good = [outcome for outcome in outcomes if slo.met_by(outcome)]
    answered = [outcome for outcome in outcomes if outcome.finished_at is not None]
    span_s = max(outcomes[-1].arrival.at - outcomes[0].arrival.at, 1e-9)
    ttft = sorted(outcome.ttft_s for outcome in answered if outcome.ttft_s is not None)
    tpot = sorted(outcome.tpot_s for outcome in answered if outcome.tpot_s is not None)
    computed = sum(outcome.computed for outcome in outcomes)
    useful = sum(outcome.computed for outcome in good)
    asked: defaultdict[int, int] = defaultdict(int)
    met: defaultdict[int, int] = defaultdict(int)
    for outcome in outcomes:
        asked[outcome.arrival.priority] += 1
    for outcome in good:
        met[outcome.arrival.priority] += 1
    return RunSummary(
        requests=len(outcomes),
        answered=len(answered),
        goodput=len(good) / span_s,
        attainment=len(good) / len(outcomes),
        by_priority={rank: met[rank] / count for rank, count in sorted(asked.items())},
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p99_s=percentile(ttft, 0.99),
        tpot_p99_s=percentile(tpot, 0.99),
        preemptions=sum(outcome.preemptions for outcome in outcomes),
        wasted=1.0 - useful / computed if computed else 0.0,
        fairness=fairness(outcomes),
        shrunk=sum(outcome.max_tokens is not None for outcome in answered) / max(1, len(answered)),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value that a share of the values does not exceed; NaN without values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def fairness(outcomes: Sequence[SimulatedRequest]) -> float:
    """Return Jain's index of service over fair share among tenants; 1 when each got exactly its fair share.

    Service is prompt tokens plus twice the output tokens, of answered requests. The total service of a
    priority class is divided among its tenants max-min fairly by their demands (no tenant gets more than it
    asked for; the rest goes to the others). The sum over the classes is a tenant's fair share.
    """
    asked: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    served: defaultdict[str, int] = defaultdict(int)
    by_class: defaultdict[int, int] = defaultdict(int)
    for outcome in outcomes:
        arrival = outcome.arrival
        asked[arrival.priority][arrival.tenant] += arrival.prompt + OUTPUT_WEIGHT * arrival.output
        if outcome.finished_at is not None:
            got = arrival.prompt + OUTPUT_WEIGHT * outcome.output
            served[arrival.tenant] += got
            by_class[arrival.priority] += got
    fair: defaultdict[str, float] = defaultdict(float)
    for rank, demands in asked.items():
        for tenant, share in max_min(demands, by_class[rank]).items():
            fair[tenant] += share
    return jain([served[tenant] / share for tenant, share in fair.items() if share > 0])


def max_min(demands: Mapping[str, float], amount: float) -> dict[str, float]:
    """Divide ``amount`` so that no tenant gets more than its demand and no smaller share could grow."""
    shares: dict[str, float] = {}
    left, remaining = float(amount), len(demands)
    for name, demand in sorted(demands.items(), key=lambda item: item[1]):
        shares[name] = min(float(demand), left / remaining)
        left -= shares[name]
        remaining -= 1
    return shares


def jain(values: Sequence[float]) -> float:
    """Return ``(sum x)² / (n · sum x²)``: 1 when all are equal or all are 0, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
