"""Goodput, waste and fairness of small examples, and the workload that is measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.simulator.calibration import MeasuredStep, fit
from evaluation.simulator.experiment import Kind, Setting, SimulationJob, best, candidates, capacity, run
from evaluation.simulator.measures import SimulatedSlo, fairness, jain, max_min, percentile, summarize
from evaluation.simulator.profiles import A10G_8B_AWQ
from evaluation.simulator.values import Arrival, SimulatedRequest
from evaluation.simulator.workload import WorkloadShape, halves, paced, rate_of, requests_of
from ops.replay.trace import read_trace

DATA = Path(__file__).resolve().parents[2] / "benchmarks" / "data"


def answered(
    number: int, *, ttft_s: float, tokens: int = 11, tpot_s: float = 0.1, **more: object
) -> SimulatedRequest:
    one = SimulatedRequest(Arrival(number, float(number), 100, tokens, 50, **more))  # type: ignore[arg-type]
    one.first_token_at = number + ttft_s
    one.finished_at = one.first_token_at + tpot_s * (tokens - 1)
    one.produced, one.computed = tokens, 100 + tokens - 1
    return one


def test_goodput_counts_answers_that_met_both_targets_and_waste_the_tokens_of_the_others() -> None:
    refused = SimulatedRequest(Arrival(3, 3.0, 100, 10, 50))
    cases = [answered(0, ttft_s=1.0), answered(1, ttft_s=3.0), answered(2, ttft_s=1.0, tpot_s=0.3), refused]
    summary = summarize(cases, SimulatedSlo(2.0, 0.2))
    assert (summary.requests, summary.answered) == (4, 3)
    assert summary.goodput == pytest.approx(1 / 3.0)
    assert summary.attainment == 0.25
    assert summary.wasted == pytest.approx(2 / 3)
    assert (summary.ttft_p50_s, summary.ttft_p99_s) == (1.0, 3.0)


def test_service_in_proportion_to_demand_is_unfair_when_one_asks_for_more_than_its_share() -> None:
    def served(big: int, small: int) -> list[SimulatedRequest]:
        outcomes = [SimulatedRequest(Arrival(n, 0.0, 100, 11, 50, tenant="big")) for n in range(20)]
        outcomes += [SimulatedRequest(Arrival(n, 0.0, 100, 11, 50, tenant="small")) for n in range(5)]
        for one in (*outcomes[:big], *outcomes[20 : 20 + small]):
            one.first_token_at = one.finished_at = 1.0
            one.produced = 11
        return outcomes

    assert fairness(served(5, 5)) == pytest.approx(1.0)
    assert fairness(served(8, 2)) < fairness(served(6, 4)) < 1.0


@given(st.dictionaries(st.text(max_size=3), st.floats(0.0, 1e6), min_size=1, max_size=8), st.floats(0.0, 1e6))
def test_fair_shares_never_pass_a_demand_and_use_all_that_is_wanted(
    demands: dict[str, float], amount: float
) -> None:
    shares = max_min(demands, amount)
    assert all(share <= demands[name] + 1e-6 for name, share in shares.items())
    assert sum(shares.values()) == pytest.approx(min(amount, sum(demands.values())), abs=1e-3)
    most = max(shares.values())
    assert all(share == pytest.approx(demands[name]) for name, share in shares.items() if share < most - 1e-3)


def test_jains_index_is_one_when_all_are_equal_and_one_in_n_when_one_has_all() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain([0.0, 0.0]) == 1.0
    assert (percentile([1.0, 2.0, 3.0], 0.5), percentile([1.0], 0.99)) == (2.0, 1.0)


def test_a_trace_becomes_requests_with_tenants_priorities_and_units() -> None:
    trace = read_trace(DATA / "mooncake_synthetic_500.jsonl")
    requests = requests_of(trace, WorkloadShape(prompt_scale=1 / 16))
    assert requests == requests_of(trace, WorkloadShape(prompt_scale=1 / 16))
    assert max(one.prompt for one in requests) <= 3400
    assert all(len(one.units) == one.prompt // 32 for one in requests)
    shares = Counter(one.priority for one in requests)
    assert 0.06 < shares[1] / len(requests) < 0.14 and 0.15 < shares[-1] / len(requests) < 0.25
    tenants = Counter(one.tenant for one in requests)
    assert tenants["t1"] > 1.3 * tenants["t2"] > 0


def test_the_halves_share_nothing_and_a_pace_changes_times_alone() -> None:
    requests = requests_of(read_trace(DATA / "azure_llm_conv_2023_2000.csv", limit=101), WorkloadShape())
    first, second = halves(requests)
    assert [one.number for one in (*first, *second)] == list(range(101))
    assert second[0].at == 0.0
    fast = paced(second, 4.0)
    assert rate_of(fast) == pytest.approx(4 * rate_of(second))
    assert [one.prompt for one in fast] == [one.prompt for one in second]


def test_capacity_is_the_rate_at_which_nineteen_in_twenty_are_in_time() -> None:
    requests = requests_of(read_trace(DATA / "azure_llm_conv_2023_2000.csv", limit=300), WorkloadShape())
    slo = SimulatedSlo(5.0, 0.25)
    rate = capacity(requests, A10G_8B_AWQ, slo)

    def attained(times: float) -> float:
        return run(SimulationJob(requests, times * rate, A10G_8B_AWQ, slo, Setting(Kind.NONE))).attainment

    assert attained(1.0) >= 0.95 > attained(1.1)


def test_the_setting_with_the_most_goodput_over_the_loads_is_chosen() -> None:
    tried = candidates(Kind.VLLM, A10G_8B_AWQ, SimulatedSlo(5.0, 0.25))
    assert len(set(tried)) == len(tried) > 10
    assert best(tried[:3], [[1.0, 1.0], [3.0, 0.5], [0.5, 2.0]]) is tried[1]
    assert [one.kind for one in candidates(Kind.NONE, A10G_8B_AWQ, SimulatedSlo(5.0, 0.25))] == [Kind.NONE]


def test_a_fit_finds_the_coefficients_that_made_the_steps_and_overlooks_a_hiccup() -> None:
    draw = np.random.default_rng(1)
    steps = []
    for _ in range(400):
        prefill, sequences = int(draw.integers(0, 256)), int(draw.integers(0, 32))
        context = sequences * int(draw.integers(50, 500))
        took_s = 0.002 + 1e-4 * prefill + 5e-5 * sequences + 4e-7 * context
        steps.append(MeasuredStep(prefill, sequences, context, took_s * float(draw.uniform(0.98, 1.02))))
    steps[7] = MeasuredStep(10, 3, 300, 3.0)
    found = fit(steps)
    assert found.base_s == pytest.approx(0.002, rel=0.05)
    assert found.prefill_s == pytest.approx(1e-4, rel=0.05)
    assert found.sequence_s == pytest.approx(5e-5, rel=0.15)
    assert found.context_s == pytest.approx(4e-7, rel=0.1)
    assert found.median_error < 0.03


def test_too_few_steps_are_no_fit() -> None:
    with pytest.raises(ValueError, match="3 steps are too few"):
        fit([MeasuredStep(1, 1, 1, 1.0)] * 3)
