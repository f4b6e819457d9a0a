"""A canary's share grows while it is as good as the rest and is rolled back when it is worse; no real traffic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from benchmarks.canary_guard import CASES, measure
from gateway.routing.canary import (
    ALPHA,
    LIFE_S,
    CanaryPlan,
    CanaryState,
    Phase,
    end,
    in_force,
    judge,
    start,
    weights_at,
)
from gateway.routing.canary_records import CanaryLease, lease_of
from gateway.routing.canary_tally import outcomes
from gateway.routing.evidence import EvidenceWindow
from gateway.state.port import Record
from observability.events import RequestRecord

PLAN = CanaryPlan("c1", "chat", "new", {"old": 75.0, "older": 25.0}, "key_1", min_samples=100, step_s=60.0)
GOOD = {"error": EvidenceWindow(1, 100, 9, 900)}


def running(plan: CanaryPlan = PLAN) -> CanaryState:
    return in_force(start(plan, read_to=0, now=0.0), 0.0)


def test_the_others_keep_their_ratio_at_each_step() -> None:
    assert weights_at(PLAN, 20.0) == {"old": 60.0, "older": 20.0, "new": 20.0}
    assert weights_at(PLAN, 100.0) == {"old": 0.0, "older": 0.0, "new": 100.0}


def test_a_step_needs_time_and_requests_of_both_sides() -> None:
    few = judge(running(), [{"error": EvidenceWindow(0, 99, 0, 900)}], read_to=1, now=1_000.0)
    young = judge(running(), [GOOD], read_to=1, now=59.0)
    assert (few.step, young.step) == (0, 0)
    more = judge(few, [{"error": EvidenceWindow(0, 1, 0, 1)}], read_to=2, now=1_001.0)
    assert (more.step, more.applied, more.counts, more.canary_requests) == (1, False, {}, 100)


def test_windows_without_requests_of_both_sides_allow_no_step() -> None:
    sides = EvidenceWindow(100, 100, 0, 0), EvidenceWindow(0, 0, 0, 900)
    alone = judge(running(), [{"error": one} for one in sides], read_to=1, now=1_000.0)
    assert (alone.step, alone.counts, alone.canary_requests) == (0, {}, 100)


def test_a_step_ends_in_time_although_the_clock_was_set_back() -> None:
    begun = in_force(running(), 10_000.0)
    young = judge(begun, [GOOD], read_to=1, now=6_400.0)
    assert young.step == begun.step
    assert judge(young, [], read_to=1, now=6_460.0).step == begun.step + 1


def test_a_good_canary_gets_the_whole_route() -> None:
    standing = running()
    for number in range(1, 4):
        standing = judge(standing, [GOOD], read_to=number, now=number * 100.0)
        standing = in_force(standing, number * 100.0)
    assert standing.phase is Phase.DONE and standing.wanted["new"] == 100.0 and not standing.needs_driver


@pytest.mark.parametrize("check", ["error", "ttft", "total", "fallback", "guardrail.language"])
def test_each_check_takes_a_bad_canary_back_and_says_why(check: str) -> None:
    windows = [{**GOOD, check: EvidenceWindow(15, 20, 2, 380)}]
    standing = judge(running(), windows, read_to=1, now=5.0)
    assert standing.phase is Phase.ROLLED_BACK and not standing.applied
    assert standing.reason.startswith(f"{check}: ") and "at 5 %" in standing.reason
    assert standing.wanted == {"new": 0.0, "old": 75.0, "older": 25.0}


def test_a_better_canary_and_an_outage_of_both_sides_cause_no_rollback() -> None:
    better = judge(running(), [{"error": EvidenceWindow(0, 500, 400, 500)}], read_to=1, now=5.0)
    outage = judge(running(), [{"error": EvidenceWindow(50, 50, 949, 950)}], read_to=1, now=5.0)
    assert better.phase is outage.phase is Phase.RUNNING


def test_a_canary_stays_at_its_step_while_its_counts_are_suspicious() -> None:
    standing = judge(running(), [{"error": EvidenceWindow(8, 150, 10, 1_350)}], read_to=1, now=1_000.0)
    assert (standing.phase, standing.step) == (Phase.RUNNING, 0)
    calmer = judge(standing, [{"error": EvidenceWindow(0, 150, 10, 1_350)}] * 4, read_to=2, now=2_000.0)
    assert calmer.step == 1


def test_a_canary_that_does_not_end_in_time_is_rolled_back() -> None:
    standing = judge(running(), [], read_to=0, now=LIFE_S)
    assert standing.phase is Phase.ROLLED_BACK and "no end" in standing.reason


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(9, 40), st.integers(0, 9), st.integers(9, 40)), max_size=30
    )
)
def test_a_canary_skips_no_step_and_ends_only_once(tables: list[tuple[int, int, int, int]]) -> None:
    standing, now = running(replace(PLAN, min_samples=20, step_s=0.0)), 0.0
    for table in tables:
        if standing.phase is not Phase.RUNNING:
            break
        now += 5.0
        after = judge(standing, [{"error": EvidenceWindow(*table)}], read_to=standing.read_to + 1, now=now)
        assert after.step - standing.step in (0, 1)
        assert after.applied is (after.step == standing.step and after.phase is Phase.RUNNING)
        standing = in_force(after, now)
        assert abs(sum(standing.wanted.values()) - 100.0) < 1e-6
    assert standing.phase in (Phase.RUNNING, Phase.DONE, Phase.ROLLED_BACK)


def test_a_standing_comes_back_from_its_record_as_it_was() -> None:
    judged = judge(running(), [GOOD, {"ttft": EvidenceWindow(1, 10, 3, 90)}], read_to=7, now=5.0)
    for standing in (running(), judged, end(judged, Phase.ABORTED, "no", 6.0)):
        lease = CanaryLease(standing, "proc_1", 20.0)
        assert lease_of(Record("canary", 1, 0.0, "canary", orjson.dumps(lease))) == lease


def record(**facts: Any) -> RequestRecord:
    base = RequestRecord("r", "g", "t", "tenant", "native", 200, 100.0, backend_name="new", drawn="new")
    given: dict[str, Any] = {"ttft_ms": 50.0, **facts}
    return structs.replace(base, **given)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, {"error": False, "fallback": False, "ttft": False, "total": False}),
        ({"status": 503, "error_code": "x", "backend_name": None}, {"error": True}),
        ({"status": 429, "error_code": "rate_limited", "backend_name": None}, {}),
        ({"status": 503, "error_code": "x", "batch_line": True}, {}),
        ({"status": 429, "error_code": "x", "batch_line": True}, {}),
        ({"status": 500, "error_code": "x", "batch_line": True}, {"error": True}),
        ({"error_code": "stream_broken"}, {"error": True}),
        ({"status": 422, "error_code": "invalid_request"}, {}),
        ({"backend_name": "old"}, {"error": False, "fallback": True}),
        ({"fallback_kind": "degraded"}, {"error": False, "fallback": True}),
        ({"ttft_ms": 201.0, "total_ms": 2_000.0},
         {"error": False, "fallback": False, "ttft": True, "total": True}),
        ({"status": 499, "error_code": "cancelled", "ttft_ms": None}, {}),
        ({"status": 499, "error_code": "cancelled", "ttft_ms": None, "total_ms": 900.0}, {"ttft": True}),
    ],
)  # fmt: skip
def test_a_request_has_the_outcomes_of_its_record(facts: dict[str, Any], said: dict[str, bool]) -> None:
    assert dict(outcomes(record(**facts), ttft_slo_ms=200.0, total_slo_ms=1_400.0)) == said


@pytest.mark.slow
def test_simulated_good_canaries_come_through_and_bad_ones_do_not() -> None:
    good, tolerated, *bad = (measure(case, 30 if case.good else 5, 20.0, 7) for case in CASES)
    assert good.rolled_back + tolerated.rolled_back <= 2 * 30 * ALPHA + 1
    assert all(result.rolled_back == result.runs for result in bad)
