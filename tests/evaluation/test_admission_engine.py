"""The clock and the request outcomes of the benchmark of the gate with the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.admission_calibration import engine_of
from benchmarks.admission_engine import MAX_NUM_SEQS, NUM_BLOCKS, Bench
from evaluation.simulator.policies import Open
from evaluation.simulator.values import Arrival

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(engine_of(MODEL, NUM_BLOCKS, MAX_NUM_SEQS))


def test_callers_of_a_closed_loop_are_answered_whole_and_never_more_at_once(bench: Bench) -> None:
    outcomes = bench.closed([Arrival(number, 3.0, 20, 6, 6) for number in range(5)], 2)
    assert [outcome.produced for outcome in outcomes] == [6] * 5
    assert all(outcome.computed == 26 and outcome.refused_at is None for outcome in outcomes)
    begun = [outcome.handed_on_at for outcome in outcomes]
    ended = sorted(outcome.finished_at or 0.0 for outcome in outcomes)
    assert begun[2] is not None and begun[2] >= ended[0], "the third begins when one of two has ended"


def test_requests_start_when_they_arrive_and_late_ones_are_given_up(bench: Bench) -> None:
    arrivals = [Arrival(0, 0.0, 20, 4, 4), Arrival(1, 900.0, 20, 4, 4), Arrival(2, 900.0, 20, 300, 300)]
    first, second, third = bench.run(arrivals, Open(), until_s=900.2)
    assert first.finished_at is not None and first.finished_at < 800.0
    assert second.handed_on_at == 900.0
    assert third.handed_on_at == 900.0 and third.finished_at is None and third.ttft_s is None
    assert bench.load().running == 0 and bench.load().max_running == MAX_NUM_SEQS, "the engine is free again"
