"""The fallback policy: which step follows which failure, and that every request ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.routing.route_limits import RESUME
from resilience.failures import FailureKind
from resilience.fallback_policy import (
    DEGRADED,
    ENGINE_TRANSITIONS,
    LEG_TRANSITIONS,
    MAX_RESUMES,
    RESPONSE_CACHE,
    STEPS,
    EngineEvent,
    EngineHealth,
    FallbackPolicy,
    Leg,
    LegEvent,
    Primary,
    ServeStored,
    Situation,
    Step,
    TryBackend,
    WaitForRestart,
)
from resilience.resume import ResumeRules

LEGS = (RESPONSE_CACHE, "twin", "far", DEGRADED)


def view(
    *able: str, back_in_s: float | None = None, restarts: bool = False, committed: bool = False
) -> Situation:
    return Situation(lambda name: name in able, back_in_s, restarts, committed)


def policy(
    legs: Sequence[str] = LEGS, *, in_hand: bool = True, rules: ResumeRules = RESUME
) -> FallbackPolicy:
    return FallbackPolicy("gpu", legs, rules, on_engine=("gpu", "twin"), in_hand=in_hand)


def test_memory_pressure_goes_straight_to_the_next_leg_and_never_back_to_the_device() -> None:
    it = policy()
    it.refused("gpu", memory=True)
    it.refused(RESPONSE_CACHE)
    assert it.next(view("gpu", "twin", "far", back_in_s=0.0, restarts=True)) == TryBackend("far")
    it.refused("far", memory=False)
    assert it.next(view("gpu", "twin", "far", back_in_s=0.0, restarts=True)) == ServeStored(DEGRADED)


def test_a_dead_engine_is_waited_for_before_the_degraded_text_but_after_the_legs() -> None:
    it = policy()
    it.failed("gpu", FailureKind.ENGINE_DEAD, moved=True)
    away = view("far", back_in_s=20.0, restarts=True)
    assert it.next(away) == ServeStored(RESPONSE_CACHE)
    it.refused(RESPONSE_CACHE)
    assert it.next(away) == TryBackend("far")
    it.failed("far", FailureKind.THROTTLED, moved=False)
    assert it.next(away) == WaitForRestart(RESUME.max_wait_s)
    it.waited(0.0, back=False)
    assert it.next(away) == ServeStored(DEGRADED)


@pytest.mark.parametrize(
    ("kind", "affords", "wanted"),
    [
        (FailureKind.STREAM_BROKEN, True, TryBackend("gpu")),
        (FailureKind.INTERNAL, True, TryBackend("gpu")),
        (FailureKind.STREAM_BROKEN, False, TryBackend("far")),
        (FailureKind.THROTTLED, True, TryBackend("far")),
        (FailureKind.NAN_OUTPUT, True, TryBackend("far")),  # the output guard has retried it
    ],
)
def test_a_whole_answer_is_asked_for_once_more_where_that_is_wise_and_paid_for(
    kind: FailureKind, affords: bool, wanted: Step
) -> None:
    it = policy(("far", DEGRADED))
    it.failed("gpu", kind, moved=False, may_retry=lambda: affords)
    there = view("gpu", "far")
    assert it.next(there) == wanted
    it.failed("gpu", kind, moved=False, may_retry=lambda: affords)
    assert it.next(there) == TryBackend("far"), "once"


def test_a_request_whose_deadline_allows_it_waits_for_a_restart_before_the_degraded_text() -> None:
    for in_time, wanted in ((True, WaitForRestart(RESUME.max_wait_s)), (False, ServeStored(DEGRADED))):
        it = policy((DEGRADED,), in_hand=False)
        it.failed("gpu", FailureKind.BACKEND_UNAVAILABLE, moved=False, away=True)
        assert it.next(replace(view(back_in_s=4.0, restarts=True), in_time=in_time)) == wanted


@pytest.mark.parametrize(
    ("back_in_s", "wanted"), [(0.5, WaitForRestart(0.75)), (1.0, TryBackend("far"))], ids=["soon", "late"]
)
def test_half_of_a_short_deadline_is_kept_for_the_legs(back_in_s: float, wanted: Step) -> None:
    it = policy(("far", DEGRADED), in_hand=False)
    it.failed("gpu", FailureKind.BACKEND_UNAVAILABLE, moved=False, away=True)
    away = replace(view("far", back_in_s=back_in_s, restarts=True), in_time=True, left_s=1.5)
    assert it.next(away) == wanted
    if isinstance(wanted, WaitForRestart):
        it.waited(0.0, back=False)
        assert it.next(away) == TryBackend("far")


def test_a_backend_that_takes_work_is_not_waited_for_when_it_reports_that_it_is_unavailable() -> None:
    it = policy((DEGRADED,), in_hand=False)
    it.failed("gpu", FailureKind.BACKEND_UNAVAILABLE, moved=False)
    there = replace(view("gpu", back_in_s=0.0, restarts=True), in_time=True)
    assert it.next(there) == ServeStored(DEGRADED)


def test_a_pool_whose_last_worker_broke_a_stream_off_is_waited_for_like_an_engine() -> None:
    it = FallbackPolicy("pool", (DEGRADED,), RESUME, in_hand=True)
    it.failed("pool", FailureKind.STREAM_BROKEN, moved=True, away=True)
    assert it.next(view(back_in_s=0.25, restarts=True, committed=True)) == WaitForRestart(RESUME.wait_s)
    it.waited(1.5, back=True)
    assert it.next(view("pool", back_in_s=0.0, restarts=True, committed=True)) == TryBackend("pool")
    it.failed("pool", FailureKind.STREAM_BROKEN, moved=True, away=True)
    long_away = view(back_in_s=20.0, restarts=True, committed=True)
    assert it.next(long_away) == WaitForRestart(RESUME.max_wait_s - RESUME.wait_s + 1.5)


def test_an_engine_that_comes_back_in_vain_is_left_to_the_other_legs() -> None:
    it = policy(("far", DEGRADED))
    there = view("gpu", "far", back_in_s=0.0, restarts=True)
    steps: list[Step | None] = []
    it.failed("gpu", FailureKind.ENGINE_DEAD, moved=False)
    while (step := it.next(there)) != TryBackend("far"):
        steps.append(step)
        if isinstance(step, WaitForRestart):
            it.waited(step.timeout_s, back=True)
        else:
            it.failed("gpu", FailureKind.ENGINE_DEAD, moved=False)
    assert steps.count(TryBackend("gpu")) == 2


def test_the_last_call_for_an_answer_is_another_legs_where_there_is_one() -> None:
    for able, last in ((("gpu", "far"), TryBackend("far")), (("gpu",), TryBackend("gpu"))):
        it = policy(("far", DEGRADED))
        steps: list[Step | None] = []
        for _ in range(MAX_RESUMES):
            it.failed("gpu", FailureKind.STREAM_BROKEN, moved=True)
            steps.append(it.next(view(*able, committed=True)))
        assert steps == [TryBackend("gpu")] * (MAX_RESUMES - 1) + [last]


def test_all_waits_together_have_one_limit() -> None:
    it = policy((DEGRADED,))
    it.failed("gpu", FailureKind.ENGINE_DEAD, moved=True)
    soon = view("gpu", back_in_s=1.0, restarts=True)
    assert it.next(soon) == WaitForRestart(RESUME.wait_s)
    it.waited(RESUME.wait_s - 0.5, back=True)  # half a second was enough
    assert it.next(soon) == TryBackend("gpu")
    it.failed("gpu", FailureKind.ENGINE_DEAD, moved=True)
    assert it.next(soon) == WaitForRestart(RESUME.wait_s)
    it.waited(0.0, back=False)
    assert it.next(soon) == WaitForRestart(RESUME.max_wait_s - 0.5 - RESUME.wait_s)


def test_a_committed_part_of_an_answer_is_followed_by_no_stored_text() -> None:
    it = policy()
    it.failed("gpu", FailureKind.STREAM_BROKEN, moved=False)
    assert it.next(view(committed=True)) is None


def test_the_transition_tables_name_every_state_and_event() -> None:
    assert {(leg, event) for leg, row in LEG_TRANSITIONS.items() for event in row} == {
        (leg, event) for leg in Leg for event in LegEvent
    }
    assert {(engine, event) for engine, row in ENGINE_TRANSITIONS.items() for event in row} == {
        (engine, event) for engine in EngineHealth for event in EngineEvent
    }
    assert set(STEPS) == {(primary, first) for primary in Primary for first in (True, False)}


def words(*cells: Enum | str) -> str:
    names = [cell if isinstance(cell, str) else cell.name.lower().replace("_", " ") for cell in cells]
    return f"| {' | '.join(names)} |"


def test_the_documentation_has_the_same_tables() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "resilience.md").read_text(encoding="utf-8").splitlines()
    for leg, row in LEG_TRANSITIONS.items():
        assert words(leg, *(row[event] for event in LegEvent)) in lines
    for engine, states in ENGINE_TRANSITIONS.items():
        assert words(engine, *(states[event] for event in EngineEvent)) in lines
    for primary in Primary:
        steps = [
            ", ".join(choice.name.lower().replace("_", " ") for choice in STEPS[primary, first])
            for first in (True, False)
        ]
        assert words(primary, *steps) in lines


class AnyRequest(RuleBasedStateMachine):
    """One request on its way through the policy, with any failures and restarts."""

    @initialize(enabled=st.booleans(), in_hand=st.booleans(), kind=st.sampled_from(FailureKind))
    def begin(self, enabled: bool, in_hand: bool, kind: FailureKind) -> None:
        self.policy = policy(in_hand=in_hand, rules=replace(RESUME, enabled=enabled))
        self.calls = 0
        self.repeats = 0
        self.waited_s = 0.0
        self.committed = False
        self.closed: set[str] = set()
        self.ended = False
        self.step: Step | None = None
        self.fail("gpu", kind, moved=False, repeats=False)

    def fail(self, backend: str, kind: FailureKind, *, moved: bool, repeats: bool) -> None:
        self.policy.failed(backend, kind, moved=moved, may_retry=lambda: repeats)
        if kind is FailureKind.CUDA_OOM:
            self.closed |= {"gpu", "twin"} if backend in ("gpu", "twin") else {backend}

    @precondition(lambda self: not self.ended and self.step is None)
    @rule(able=st.sets(st.sampled_from(["gpu", "twin", "far"])), back_in_s=st.sampled_from([None, 0.5, 20.0]))
    def ask(self, able: set[str], back_in_s: float | None) -> None:
        restarts = back_in_s is not None
        self.step = self.policy.next(
            view(*able, back_in_s=back_in_s, restarts=restarts, committed=self.committed)
        )
        self.ended = self.step is None or self.step == ServeStored(DEGRADED)
        if isinstance(self.step, TryBackend):
            self.calls += 1
            assert self.step.backend in able and self.step.backend not in self.closed
        if isinstance(self.step, ServeStored):
            assert not self.committed, "a committed answer is not replaced by a stored one"

    @precondition(lambda self: isinstance(self.step, TryBackend))
    @rule(kind=st.sampled_from(FailureKind), gave=st.booleans(), repeats=st.booleans())
    def fails(self, kind: FailureKind, gave: bool, repeats: bool) -> None:
        assert isinstance(self.step, TryBackend)
        self.committed = self.committed or gave
        self.fail(self.step.backend, kind, moved=gave, repeats=repeats)
        self.step = None

    @precondition(lambda self: isinstance(self.step, TryBackend))
    @rule(memory=st.booleans())
    def is_refused(self, memory: bool) -> None:
        assert isinstance(self.step, TryBackend)
        self.policy.refused(self.step.backend, memory=memory)
        if memory:
            self.closed |= {"far"} if self.step.backend == "far" else {"gpu", "twin"}
        self.step = None

    @precondition(lambda self: isinstance(self.step, WaitForRestart))
    @rule(back=st.booleans(), used=st.floats(0.1, 1.0))
    def waits(self, back: bool, used: float) -> None:
        assert isinstance(self.step, WaitForRestart)
        used_s = self.step.timeout_s * (used if back else 1.0)
        self.waited_s += used_s
        self.policy.waited(self.step.timeout_s - used_s, back=back)
        self.step = None

    @precondition(lambda self: self.step == ServeStored(RESPONSE_CACHE))
    @rule()
    def finds_nothing_stored(self) -> None:
        self.policy.refused(RESPONSE_CACHE)
        self.step = None

    @precondition(lambda self: self.ended)
    @rule()
    def has_ended(self) -> None:
        assert self.step is None or self.step == ServeStored(DEGRADED)

    @invariant()
    def calls_and_waits_are_bounded(self) -> None:
        if hasattr(self, "policy"):
            assert self.calls <= MAX_RESUMES + len(LEGS)
            assert self.waited_s <= RESUME.max_wait_s * (1 + 1e-9)

    def teardown(self) -> None:
        """Whatever has happened, the request ends when no call succeeds any more."""
        if not hasattr(self, "policy"):
            return
        for _ in range(200):
            if self.ended:
                return
            if isinstance(self.step, TryBackend):
                self.fails(FailureKind.STREAM_BROKEN, True, True)
            elif isinstance(self.step, WaitForRestart):
                self.waits(True, 0.5)
            elif self.step is not None:
                self.finds_nothing_stored()
            else:
                self.ask({"gpu", "twin", "far"}, 0.5)
            self.calls_and_waits_are_bounded()
        raise AssertionError("the request does not end")


TestAnyRequest = AnyRequest.TestCase
