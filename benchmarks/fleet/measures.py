"""The figures of a run of a fleet."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fleet.front import costs_of
from benchmarks.fleet.simulation import Result
from benchmarks.fleet.traffic import ideal_hits
from evaluation.simulator.measures import SimulatedSlo, percentile

# Share of the run at its beginning, when workers are idle: it counts for caches, not for goodput.
WARM_UP = 0.2


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one fleet.

    Args:
        offered: requests per second and worker; after the warm-up, as are the next two.
        goodput: requests per second and worker that met the SLO.
        attainment: share of the requests that met the SLO.
        refused: share of all requests, by reason.
        ttft_p50_s, ttft_p99_s: of the answered requests.
        hits: share of the prompt tokens handed on that were in a worker's cache.
        ideal: the same for a single cache of unlimited size over all requests.
        balance: the 99th percentile of requests on a worker over their mean, once a second, averaged.
        cost_p50_us, cost_p99_us, cost_mean_us: CPU time of a request's decisions (pool's load, gate, place).
    """

    requests: int
    offered: float
    goodput: float
    attainment: float
    refused: dict[str, float]
    ttft_p50_s: float
    ttft_p99_s: float
    hits: float
    ideal: float
    balance: float
    cost_p50_us: float
    cost_p99_us: float
    cost_mean_us: float


def figures(
    results: Sequence[Result], slo: SimulatedSlo, workers: int, span_s: float, unit_tokens: int
) -> Figures:
    """Return the figures of several runs of the same fleet, each with at least one request."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    counted = [outcome for outcome in outcomes if outcome.arrival.at >= WARM_UP * span_s]
    good = sum(slo.met_by(outcome) for outcome in counted)
    whole_s = (1 - WARM_UP) * span_s * workers * len(results)
    ttft = sorted(outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None)
    costs = sorted(cost for result in results for cost in costs_of(result.fronts))
    reasons = Counter(outcome.reason for outcome in outcomes if outcome.reason is not None)
    handed_on = sum(outcome.arrival.prompt for outcome in outcomes if outcome.handed_on_at is not None)
    found = [ideal_hits([outcome.arrival for outcome in result.outcomes], unit_tokens) for result in results]
    return Figures(
        requests=len(outcomes),
        offered=len(counted) / whole_s,
        goodput=good / whole_s,
        attainment=good / max(1, len(counted)),
        refused={reason: count / len(outcomes) for reason, count in sorted(reasons.items())},
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p99_s=percentile(ttft, 0.99),
        hits=sum(outcome.cached for outcome in outcomes) / max(1, handed_on),
        ideal=sum(found) / max(1, sum(outcome.arrival.prompt for outcome in outcomes)),
        balance=_balance([sample for result in results for sample in result.samples]),
        cost_p50_us=1e6 * percentile(costs, 0.5),
        cost_p99_us=1e6 * percentile(costs, 0.99),
        cost_mean_us=1e6 * sum(costs) / max(1, len(costs)),
    )


def _balance(samples: Sequence[tuple[int, ...]]) -> float:
    ratios = [percentile(sorted(one), 0.99) * len(one) / sum(one) for one in samples if sum(one)]
    return sum(ratios) / len(ratios) if ratios else math.nan
