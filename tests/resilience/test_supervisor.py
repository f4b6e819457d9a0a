"""The supervisor's decisions, tested without a process, a clock or waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.supervisor import (
    HOUR_S,
    LONGEST_GAP_S,
    LONGEST_WAIT_S,
    EngineGivenUp,
    EngineRestarting,
    Loss,
    Observation,
    Supervisor,
    SupervisorState,
)

LOOK_S = 0.25
STOPPED_S = 0.5


def running(*, restarts: int = 5, hang_s: float = 30.0, load_s: float = 4.0) -> Supervisor:
    """Returns a supervisor whose engine has just loaded, at time 0."""
    supervisor = Supervisor(max_restarts_per_hour=restarts, hang_s=hang_s, stopped_s=STOPPED_S)
    supervisor.load_begun(-load_s)
    supervisor.started(0.0)
    return supervisor


def observe(
    supervisor: Supervisor, seen: Observation, *, begin: float, for_s: float
) -> tuple[float, Loss] | None:
    """Observes ``seen`` every quarter of a second; returns when a loss was found and which, None if none."""
    for look in range(int(for_s / LOOK_S) + 1):
        at = begin + look * LOOK_S
        if (loss := supervisor.observe(at, seen)) is not None:
            return at, loss
    return None


def test_the_first_restart_comes_at_once_and_the_next_ones_wait_twice_as_long_each() -> None:
    supervisor = running(restarts=8)
    waits = []
    for at in range(9):
        decision = supervisor.lost(float(at), Loss.EXITED)
        waits.append(decision.wait_s if isinstance(decision, EngineRestarting) else None)
        supervisor.started(float(at))
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]


def test_the_sixth_death_within_an_hour_is_the_last() -> None:
    supervisor = running()
    for attempt in range(1, 6):
        decision = supervisor.lost(attempt * 100.0, Loss.EXITED)
        assert isinstance(decision, EngineRestarting) and decision.attempt == attempt
        supervisor.load_begun(attempt * 100.0 + 1)
        supervisor.started(attempt * 100.0 + 2)
    assert supervisor.lost(600.0, Loss.EXITED) == EngineGivenUp(Loss.EXITED, 5)
    assert supervisor.state is SupervisorState.GIVEN_UP
    assert supervisor.ready_in_s(600.0) is None
    assert supervisor.lost(9999.0, Loss.EXITED) is None, "an operator restarts it, nobody else"


def test_a_death_an_hour_later_begins_anew() -> None:
    supervisor = running(restarts=1)
    assert supervisor.lost(10.0, Loss.EXITED) == EngineRestarting(Loss.EXITED, 1, 0.0)
    supervisor.started(12.0)
    assert supervisor.restarts_last_hour(10.0 + HOUR_S - 1) == 1
    assert supervisor.lost(10.0 + HOUR_S, Loss.EXITED) == EngineRestarting(Loss.EXITED, 1, 0.0)


def test_with_no_restarts_allowed_the_first_death_is_the_end() -> None:
    assert running(restarts=0).lost(1.0, Loss.EXITED) == EngineGivenUp(Loss.EXITED, 0)


def test_a_restart_that_fails_counts_and_waits_like_a_death() -> None:
    supervisor = running(restarts=2)
    supervisor.lost(1.0, Loss.EXITED)
    assert supervisor.start_failed(2.0) == EngineRestarting(Loss.START_FAILED, 2, 1.0)
    assert supervisor.start_failed(4.0) == EngineGivenUp(Loss.START_FAILED, 2)


def test_a_first_start_that_fails_is_not_repeated() -> None:
    supervisor = Supervisor(max_restarts_per_hour=5, hang_s=30.0, stopped_s=STOPPED_S)
    supervisor.load_begun(0.0)
    assert supervisor.start_failed(1.0) is None
    assert supervisor.lost(1.0, Loss.EXITED) is None


def test_one_death_reported_twice_is_one_restart() -> None:
    supervisor = running()
    assert supervisor.lost(1.0, Loss.STOPPED) is not None
    assert supervisor.lost(1.1, Loss.EXITED) is None
    assert supervisor.restarts_last_hour(1.1) == 1


def test_an_engine_that_was_ended_on_purpose_is_not_lost() -> None:
    supervisor = running()
    supervisor.stop()
    assert supervisor.lost(1.0, Loss.EXITED) is None
    supervisor.started(2.0)
    assert supervisor.state is SupervisorState.STOPPED


def test_a_stop_during_a_restart_lets_no_further_one_come() -> None:
    supervisor = running()
    supervisor.lost(1.0, Loss.EXITED)
    supervisor.stop()
    assert supervisor.start_failed(2.0) is None


def test_a_restart_is_expected_to_take_what_the_last_start_took() -> None:
    supervisor = running(load_s=4.0)
    assert supervisor.ready_in_s(0.0) is None
    supervisor.lost(10.0, Loss.EXITED)
    assert supervisor.ready_in_s(11.0) == pytest.approx(3.0)
    supervisor.load_begun(12.0)
    assert supervisor.ready_in_s(12.0) == pytest.approx(4.0)
    supervisor.started(14.0)
    supervisor.lost(20.0, Loss.EXITED)
    assert supervisor.ready_in_s(20.0) == pytest.approx(3.0), "a wait of 1 s, then the 2 s of the last start"


def test_a_late_restart_is_expected_to_take_as_long_again_as_it_is_late() -> None:
    supervisor = running(load_s=4.0)
    supervisor.lost(10.0, Loss.EXITED)
    assert supervisor.ready_in_s(17.0) == pytest.approx(3.0)


@given(offset_s=st.floats(0.0, LOOK_S))
def test_a_process_that_stands_still_is_found_within_a_second(offset_s: float) -> None:
    supervisor = running()
    observe(supervisor, Observation(), begin=0.0, for_s=5.0)
    stopped_at = 5.0 + LOOK_S - offset_s
    found = observe(supervisor, Observation(stopped=True), begin=5.0 + LOOK_S, for_s=5.0)
    assert found is not None and found[1] is Loss.STOPPED
    assert found[0] - stopped_at < 1.0


def test_a_process_that_goes_on_again_soon_is_only_suspect() -> None:
    supervisor = running()
    supervisor.observe(1.0, Observation())
    for at in (1.25, 1.5, 1.7):
        assert supervisor.observe(at, Observation(stopped=True)) is None
        assert supervisor.state is SupervisorState.SUSPECT
    assert supervisor.observe(1.8, Observation()) is None
    assert supervisor.state is SupervisorState.READY
    assert supervisor.observe(2.0, Observation(stopped=True)) is None, "the time counts from the second stop"
    assert supervisor.observe(2.0 + STOPPED_S - 0.01, Observation(stopped=True)) is None


def test_work_without_a_step_is_a_loss_after_its_time_and_suspect_after_half() -> None:
    supervisor = running(hang_s=30.0)
    supervisor.observe(0.0, Observation())
    stuck = Observation(unfinished=3, steps=7)
    assert observe(supervisor, stuck, begin=LOOK_S, for_s=14.0) is None
    assert supervisor.state is SupervisorState.READY
    found = observe(supervisor, stuck, begin=14.5, for_s=30.0)
    assert found is not None and found[1] is Loss.NO_PROGRESS
    assert 30.0 <= found[0] < 31.0
    assert supervisor.state is SupervisorState.SUSPECT


def test_an_engine_without_work_may_rest_for_ever() -> None:
    supervisor = running(hang_s=1.0)
    assert observe(supervisor, Observation(steps=7), begin=0.0, for_s=600.0) is None
    assert observe(supervisor, Observation(unfinished=1, steps=7), begin=600.25, for_s=0.5) is None, (
        "its time begins with the work"
    )


def test_steps_however_slow_are_progress() -> None:
    supervisor = running(hang_s=30.0)
    for step in range(20):
        seen = Observation(unfinished=1, steps=step)
        assert observe(supervisor, seen, begin=step * 29.0, for_s=28.9) is None


def test_a_supervisor_that_itself_stood_still_reports_no_loss() -> None:
    supervisor = running(hang_s=30.0)
    stuck = Observation(stopped=True, unfinished=1, steps=1)
    supervisor.observe(0.0, Observation(unfinished=1, steps=1))
    supervisor.observe(LOOK_S, stuck)
    late = LOOK_S + LONGEST_GAP_S + 100.0
    assert supervisor.observe(late, stuck) is None
    assert supervisor.observe(late + LOOK_S, stuck) is None


def test_a_process_that_has_ended_is_a_loss_at_once() -> None:
    assert running().observe(1.0, Observation(exited=True)) is Loss.EXITED


def test_an_engine_that_stands_still_while_it_loads_again_is_found_too() -> None:
    supervisor = running()
    supervisor.lost(1.0, Loss.EXITED)
    supervisor.load_begun(1.0)
    found = observe(supervisor, Observation(stopped=True), begin=1.25, for_s=5.0)
    assert found is not None and found[1] is Loss.STOPPED
    assert supervisor.state is SupervisorState.RESTARTING


@given(
    deaths=st.lists(st.tuples(st.floats(0.0, 4000.0), st.booleans()), min_size=1, max_size=60),
    most=st.integers(0, 7),
)
def test_no_hour_ever_sees_more_restarts_than_allowed(deaths: list[tuple[float, bool]], most: int) -> None:
    supervisor = running(restarts=most)
    now, restarts = 0.0, list[float]()
    for after_s, loads in deaths:
        now += after_s
        restarting = supervisor.state is SupervisorState.RESTARTING
        decision = supervisor.start_failed(now) if restarting else supervisor.lost(now, Loss.EXITED)
        if not isinstance(decision, EngineRestarting):
            assert supervisor.state is SupervisorState.GIVEN_UP
            break
        assert 0.0 <= decision.wait_s <= LONGEST_WAIT_S
        restarts.append(now)
        if loads:
            supervisor.started(now)
    for first in restarts:
        assert sum(first <= at < first + HOUR_S for at in restarts) <= most
