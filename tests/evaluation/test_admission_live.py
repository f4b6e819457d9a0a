"""How the live admission benchmark evaluates its figures; its runs need a quiet machine and minutes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.admission_live import (
    Level,
    capacity_of,
    firsts_of,
    level_of,
    predicted,
    profile_of,
    steps_of,
    wait_error,
)  # fmt: skip
from benchmarks.admission_live_load import MACHINES, simulated_of
from evaluation.simulator.calibration import fit
from evaluation.simulator.measures import SimulatedSlo
from evaluation.simulator.values import Arrival, Profile
from ops.replay.outcome import ReplayedRequest

WHOLE = ReplayedRequest(
    index=0, due_s=1.0, sent_s=1.5, asked_input=100, asked_output=11, total_s=3.0, ttft_s=0.5,
    last_token_s=2.5, input_tokens=100, output_tokens=11, cached_tokens=40,
)  # fmt: skip
ARRIVAL = Arrival(0, 1.0, 100, 11, 11)
PROFILE = Profile("tiny", 0.01, 0.0001, 0.001, 0.0, 400, max_num_seqs=4, max_num_batched_tokens=64)


def test_a_clients_delay_counts_against_the_first_token() -> None:
    request = simulated_of(ARRIVAL, WHOLE)
    assert (request.ttft_s, request.tpot_s, request.computed) == (1.0, pytest.approx(0.2), 71)


def test_a_refused_or_abandoned_request_has_no_answer() -> None:
    refused = simulated_of(ARRIVAL, replace(WHOLE, code="wait_exceeded", ttft_s=None))
    assert (refused.reason, refused.finished_at, refused.computed) == ("wait_exceeded", None, 0)
    assert simulated_of(ARRIVAL, None).finished_at is None


def test_answers_that_end_after_a_closed_loop_do_not_count_in_its_rate() -> None:
    late = replace(WHOLE, total_s=30.0)
    assert level_of(2, [WHOLE, WHOLE, late], seconds=10.0).rate == 0.2


def test_capacity_is_the_fastest_level_whose_answers_were_in_time() -> None:
    levels = [Level(1, 2.0, 0.1, 0.1), Level(2, 3.0, 0.1, 0.1), Level(4, 9.0, 5.0, 0.1)]
    slow = replace(WHOLE, ttft_s=5.0)
    assert capacity_of(levels, [[WHOLE], [WHOLE] * 19 + [slow], [slow]], SimulatedSlo(1.0, 1.0)) == 3.0


def test_a_profile_fitted_to_closed_loops_predicts_another_one() -> None:
    def loop(callers: int, seconds: float = 100.0) -> list[ReplayedRequest]:
        """Return the callers' answers: a step takes 10 ms plus 1 ms a sequence, with little prefill."""
        tpot_s = 0.010 + 0.001 * callers
        answer = replace(
            WHOLE, input_tokens=40, cached_tokens=0, output_tokens=101, ttft_s=0.014,
            last_token_s=0.014 + 100 * tpot_s,
        )  # fmt: skip
        each = round(seconds / (101 * tpot_s))
        return [replace(answer, sent_s=0.0, total_s=1.0)] * (callers * each)

    steps = [step for callers in (1, 4, 16) for step in steps_of(loop(callers), 100.0)]
    found = fit([*firsts_of(loop(1)), *steps])
    profile = profile_of(found, MACHINES["embedded"])
    assert profile.step_s(0, 8, 8 * 90) == pytest.approx(0.018, rel=0.05)
    assert profile.step_s(40, 0, 0) == pytest.approx(0.014, rel=0.05)


def test_the_error_of_the_estimates_is_what_the_histogram_has_grown_by() -> None:
    before = {0.1: 50.0, 0.2: 50.0, math.inf: 50.0}
    after = {0.1: 60.0, 0.2: 70.0, math.inf: 70.0}
    assert wait_error(before, after) == (pytest.approx(0.1), pytest.approx(0.18))
    assert wait_error(after, after) is None


def test_simulated_answers_that_finish_after_the_end_count_as_given_up() -> None:
    requests = [Arrival(number, number * 0.01, 200, 20, 20) for number in range(200)]
    slo = SimulatedSlo(1.0, 1.0)
    short, long = (predicted(requests, PROFILE, slo, "none", grace_s) for grace_s in (1.0, 1e6))
    assert short.answered < long.answered == 200
    assert short.goodput == pytest.approx(long.goodput)
