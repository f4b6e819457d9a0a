"""The simulated worker: equal to a plain model of the same rules; its counts of blocks always agree."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.simulator.policies import Open
from evaluation.simulator.run import simulate
from evaluation.simulator.values import Arrival, Profile, SimulatedRequest
from evaluation.simulator.worker import SimulatedWorker
from tests.evaluation.plain_worker import PlainWorker

SMALL = Profile(
    "small",
    base_s=0.01,
    prefill_s=0.001,
    sequence_s=0.0005,
    context_s=1e-5,
    total_blocks=24,
    block_size=4,
    max_num_seqs=6,
    max_num_batched_tokens=16,
    unit_tokens=8,
)


def profiles() -> st.SearchStrategy[Profile]:
    return st.builds(
        lambda blocks, seqs, budget, reserve: Profile(
            "random", 0.01, 0.001, 0.0005, 1e-5, blocks, 4, seqs, budget, 8, reserve_prompt=reserve
        ),
        blocks=st.integers(16, 40),
        seqs=st.integers(1, 8),
        budget=st.integers(8, 40),
        reserve=st.booleans(),
    )


@st.composite
def traces(draw: st.DrawFn) -> list[Arrival]:
    gaps = draw(st.lists(st.floats(0.0, 0.3), min_size=1, max_size=25))
    at, out = 0.0, []
    for number, gap in enumerate(gaps):
        at += gap
        family = draw(st.integers(0, 3))
        # Equal unit ids mean equal prefixes: an id is made of a family and a depth.
        units = tuple(100 * family + depth for depth in range(5)) if family else ()
        out.append(Arrival(number, at, draw(st.integers(1, 40)), draw(st.integers(1, 18)), 18, units=units))
    return out


@settings(max_examples=60, deadline=None)
@given(trace=traces(), profile=profiles())
def test_the_simulated_worker_gives_the_same_results_as_the_plain_worker(
    trace: list[Arrival], profile: Profile
) -> None:
    same_as_plain(trace, profile)


def same_as_plain(trace: list[Arrival], profile: Profile) -> None:
    outcomes = simulate(trace, profile, lambda worker: Open())
    plain = PlainWorker(profile).run(trace)
    for sim, one in zip(outcomes, plain, strict=True):
        assert sim.first_token_at == pytest.approx(one.first_at, rel=1e-9)
        assert sim.finished_at == pytest.approx(one.done_at, rel=1e-9)
        assert (sim.produced, sim.computed, sim.preemptions) == (one.produced, one.total, one.preemptions)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_the_simulated_worker_equals_the_plain_one_when_memory_is_short(seed: int) -> None:
    draw = random.Random(seed)
    profile = Profile(
        "tight",
        base_s=0.01,
        prefill_s=0.001,
        sequence_s=0.0005,
        context_s=1e-5,
        total_blocks=draw.randint(16, 30),
        block_size=4,
        max_num_seqs=draw.randint(2, 8),
        max_num_batched_tokens=draw.randint(8, 40),
        unit_tokens=8,
        reserve_prompt=draw.random() < 0.5,
    )
    at, trace = 0.0, []
    for number in range(draw.randint(10, 40)):
        at += 0.1 * draw.random()
        family = draw.randint(0, 3)
        units = tuple(100 * family + depth for depth in range(5)) if family else ()
        trace.append(Arrival(number, at, draw.randint(1, 40), draw.randint(1, 18), 18, units=units))
    same_as_plain(trace, profile)


@settings(max_examples=40, deadline=None)
@given(trace=traces(), profile=profiles())
def test_no_block_and_no_sequence_is_ever_lost(trace: list[Arrival], profile: Profile) -> None:
    worker = SimulatedWorker(profile)
    coming, now = [SimulatedRequest(arrival) for arrival in trace], 0.0
    outcomes = list(coming)
    while coming or worker.busy:
        while coming and (coming[0].arrival.at <= now or not worker.busy):
            worker.submit(coming.pop(0))
        now = worker.advance(now, coming[0].arrival.at if coming else now + 1.0).at
        worker.settle()
        worker.check()
        assert worker.load.running + worker.load.waiting == sum(
            outcome.finished_at is None for outcome in outcomes if outcome not in coming
        )
    assert worker.memory.used == 0
    assert all(outcome.produced == outcome.arrival.output for outcome in outcomes)
    assert sum(outcome.preemptions for outcome in outcomes) == worker.preemptions


def test_an_idle_worker_takes_the_time_of_its_chunks_and_its_tokens() -> None:
    [outcome] = simulate([Arrival(0, 1.0, 40, 3, 3)], SMALL, lambda worker: Open())
    assert outcome.ttft_s == pytest.approx(3 * 0.01 + 40 * 0.001)
    assert outcome.finished_at == pytest.approx(1.07 + 2 * 0.0105 + 1e-5 * (40 + 41))


def test_a_prefix_that_was_computed_is_found_and_one_that_is_being_computed_is_not() -> None:
    units = (1, 2, 3)
    together = simulate(
        [Arrival(n, 0.0, 26, 2, 2, units=units) for n in range(2)], SMALL, lambda worker: Open()
    )
    later = simulate(
        [Arrival(n, float(n), 26, 2, 2, units=units) for n in range(2)], SMALL, lambda worker: Open()
    )
    assert [outcome.cached for outcome in together] == [0, 16]  # the third unit is just being computed
    assert [outcome.cached for outcome in later] == [0, 24]
    assert later[1].computed == later[0].computed - 24


def test_when_blocks_run_out_the_newest_is_preempted_and_computed_again() -> None:
    trace = [Arrival(n, 0.001 * n, 30, 40, 40) for n in range(3)]
    outcomes = simulate(trace, SMALL, lambda worker: Open())
    assert outcomes[0].preemptions == 0 < outcomes[2].preemptions
    assert outcomes[2].computed > 30 + 39
    assert all(outcome.produced == 40 for outcome in outcomes)


def test_an_engine_that_goes_by_priority_starts_the_urgent_first_and_preempts_it_last() -> None:
    trace = [Arrival(n, 0.0, 30, 40, 40, priority=n - 1) for n in range(3)]
    by_priority = Profile("p", 0.01, 0.001, 0.0005, 1e-5, 24, 4, 6, 16, 8, by_priority=True)
    outcomes = simulate(trace, by_priority, lambda worker: Open())
    assert outcomes[2].preemptions == 0 < outcomes[0].preemptions
    assert (outcomes[2].finished_at or 0.0) < (outcomes[0].finished_at or 0.0)


def test_during_a_step_the_load_is_what_the_worker_told_before_it() -> None:
    worker = SimulatedWorker(SMALL)
    worker.submit(SimulatedRequest(Arrival(0, 0.0, 16, 1, 1)))
    end = worker.advance(0.0)
    worker.submit(SimulatedRequest(Arrival(1, 0.0, 16, 1, 1)))
    assert [outcome.arrival.number for outcome in end.finished] == [0]
    assert (worker.load.running, worker.load.waiting) == (0, 2)
    worker.settle()
    assert (worker.load.running, worker.load.waiting) == (0, 1)


def test_a_request_that_never_fits_is_refused_with_the_figures() -> None:
    with pytest.raises(ValueError, match="request 0 needs 104 tokens; the pool of small holds 96"):
        simulate([Arrival(0, 0.0, 90, 10, 10)], SMALL, lambda worker: Open())


def test_a_step_that_cannot_hold_a_token_of_each_sequence_is_no_profile() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens 4 is below max_num_seqs 6"):
        Profile("bad", 0.01, 0.001, 0.0, 0.0, 24, max_num_seqs=6, max_num_batched_tokens=4)


def test_two_runs_of_the_same_trace_are_equal() -> None:
    trace = [Arrival(n, 0.01 * n, 20, 5, 5) for n in range(40)]
    first, again = (simulate(trace, SMALL, lambda worker: Open()) for _ in range(2))
    assert first == again
