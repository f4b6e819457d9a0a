"""What each policy decides, on examples small enough to follow."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from admission.values import AdmissionLimits, BackendLoad
from evaluation.simulator.policies import EngineBounds, GatePolicy, Open, StaticThresholds
from evaluation.simulator.run import simulate
from evaluation.simulator.values import Arrival, Profile, SimulatedRequest

IDLE = BackendLoad(running=0, waiting=0, kv_usage=0.0, total_blocks=1000, block_size=16, max_running=8)
PROFILE = Profile("test", 0.01, 0.001, 0.0, 0.0, 1000, max_num_seqs=8, max_num_batched_tokens=100)


def outcome(number: int = 0, prompt: int = 100, priority: int = 0) -> SimulatedRequest:
    return SimulatedRequest(Arrival(number, 0.0, prompt, 10, 10, priority=priority))


def test_without_admission_everything_is_handed_on() -> None:
    assert Open().arrive(outcome(), structs.replace(IDLE, waiting=10_000, kv_usage=1.0), 0.0).refuse == ()


def test_vllms_bound_on_requests_counts_those_that_run_as_well() -> None:
    policy = EngineBounds(max_requests=2)
    first, second, third = outcome(0), outcome(1), outcome(2)
    assert policy.arrive(first, IDLE, 0.0).hand_on and policy.arrive(second, IDLE, 0.0).hand_on
    policy.first_token(first, 0.5)
    assert policy.arrive(third, IDLE, 1.0).refuse == ((third, "max_num_queued_reqs"),)
    policy.finished(first, 2.0)
    assert policy.arrive(third, IDLE, 2.0).hand_on == (third,)


def test_vllms_bound_on_tokens_looks_at_prompts_in_prefill_and_not_at_the_new_one() -> None:
    policy = EngineBounds(max_tokens=150)
    first, second, third = outcome(0), outcome(1, prompt=5000), outcome(2, prompt=1)
    assert policy.arrive(first, IDLE, 0.0).hand_on and policy.arrive(second, IDLE, 0.0).hand_on
    assert policy.arrive(third, IDLE, 0.0).refuse == ((third, "max_num_queued_tokens"),)
    policy.first_token(second, 1.0)
    assert policy.arrive(third, IDLE, 1.0).hand_on == (third,)


def test_the_static_thresholds_refuse_for_memory_prompt_length_and_queue_depth() -> None:
    policy = StaticThresholds()
    cases = [
        (outcome(), structs.replace(IDLE, kv_usage=0.93), "memory_pressure"),
        (outcome(prompt=3601), IDLE, "token_budget_exceeded"),
        (outcome(), structs.replace(IDLE, waiting=100), "queue_full"),
        (outcome(priority=1), structs.replace(IDLE, waiting=119), None),
        (outcome(priority=1), structs.replace(IDLE, waiting=120), "queue_full"),
    ]
    for one, load, reason in cases:
        refused = policy.arrive(one, load, 0.0).refuse
        assert [why for _, why in refused] == ([] if reason is None else [reason])


def test_the_static_wait_estimate_grows_with_the_number_of_waiting_requests() -> None:
    policy, served = StaticThresholds(), outcome()
    served.handed_on_at = 0.0
    policy.finished(served, 4.0)
    busy = structs.replace(IDLE, running=8, waiting=4)
    assert [why for _, why in policy.arrive(outcome(1), busy, 5.0).refuse] == ["wait_exceeded"]
    assert policy.arrive(outcome(2), structs.replace(busy, waiting=3), 5.0).hand_on


def test_the_gate_keeps_what_must_wait_and_refuses_what_would_be_late() -> None:
    trace = [Arrival(n, 0.001 * n, 100, 2, 2) for n in range(30)]
    limits = AdmissionLimits(max_wait_s=5.0, max_prefill_tokens=100)
    patient = simulate(trace, PROFILE, lambda w: GatePolicy(limits, produced=w.produced))
    assert all(one.finished_at is not None for one in patient)
    assert max((one.handed_on_at or 0.0) - one.arrival.at for one in patient) > 1.0
    strict = replace(limits, first_token_within_s=1.0)
    hurried = simulate(trace, PROFILE, lambda w: GatePolicy(strict, produced=w.produced))
    answered = [one for one in hurried if one.finished_at is not None]
    assert 5 <= len(answered) <= 9
    assert all(one.reason == "wait_exceeded" for one in hurried if one.refused_at is not None)
    assert all((one.ttft_s or 0.0) <= 1.0 for one in answered)


def test_at_the_gate_the_urgent_go_first() -> None:
    trace = [Arrival(n, 0.0, 100, 2, 2, priority=1 if n == 9 else 0) for n in range(10)]
    limits = AdmissionLimits(max_wait_s=60.0, max_prefill_tokens=100)
    outcomes = simulate(trace, PROFILE, lambda w: GatePolicy(limits, produced=w.produced))
    order = sorted(outcomes, key=lambda one: one.first_token_at or 0.0)
    assert [one.arrival.number for one in order[:3]] == [0, 9, 1]


def test_every_request_is_answered_or_refused_with_a_reason_exactly_once() -> None:
    trace = [Arrival(n, 0.02 * n, 50 + n % 70, 5 + n % 9, 20, tenant=f"t{n % 3}") for n in range(300)]
    small = replace(PROFILE, total_blocks=40)
    patient = AdmissionLimits(max_wait_s=1.0, first_token_within_s=2.0)
    for limits in (patient, replace(patient, max_queue=3, tpot_slo_s=0.05)):
        outcomes = simulate(trace, small, lambda w: GatePolicy(limits, produced=w.produced))  # noqa: B023
        assert all((one.finished_at is None) != (one.reason is None) for one in outcomes)
        assert any(one.reason for one in outcomes) and any(one.finished_at for one in outcomes)
