"""The load factor after out of memory: bounded, never zero, and back to 1 without further incidents."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilience.oom import LEAST, ONE_INCIDENT_S, RESTORE, RESTORE_EVERY_S, SHRINK, LoadFactor


def test_a_backend_that_never_ran_out_of_memory_gets_its_full_load() -> None:
    factor = LoadFactor()
    assert factor.at(0.0) == factor.at(1e9) == 1.0
    assert factor.next_change(5.0) is None


def test_each_incident_takes_thirty_percent_down_to_a_quarter() -> None:
    factor = LoadFactor()
    seen = [factor.ran_out(100.0 + at * 3) for at in range(6)]
    assert seen == pytest.approx([0.7, 0.49, 0.343, LEAST, LEAST, LEAST])


def test_a_whole_batch_that_fails_at_once_is_one_incident() -> None:
    factor = LoadFactor()
    assert [factor.ran_out(100.0 + at * 0.05) for at in range(32)] == [SHRINK] * 32
    assert factor.ran_out(100.0 + ONE_INCIDENT_S) == pytest.approx(SHRINK * SHRINK)


def test_the_load_rises_by_a_twentieth_every_ten_seconds_and_a_failure_starts_the_wait_anew() -> None:
    factor = LoadFactor()
    factor.ran_out(100.0)
    assert factor.at(109.9) == SHRINK
    assert factor.at(110.0) == pytest.approx(SHRINK + RESTORE)
    assert factor.at(160.0) == pytest.approx(1.0)
    assert factor.next_change(161.0) is None
    factor = LoadFactor()
    factor.ran_out(100.0)
    factor.ran_out(101.0)  # the same incident, but not calm yet
    assert factor.at(110.5) == SHRINK
    assert factor.next_change(105.0) == 101.0 + RESTORE_EVERY_S


@given(gaps=st.lists(st.floats(0, 120), max_size=40), looks=st.lists(st.floats(0, 300), max_size=20))
def test_the_load_is_bounded_falls_only_by_failures_and_rises_in_calm_time(
    gaps: list[float], looks: list[float]
) -> None:
    factor, now = LoadFactor(), 1000.0
    for gap in gaps:
        before = factor.at(now)
        now += gap
        waited = factor.at(now)
        assert waited >= before
        after = factor.ran_out(now)
        assert LEAST <= after <= waited <= 1.0
        assert after >= max(LEAST, waited * SHRINK) - 1e-12
    last = 0.0
    for at in sorted(looks):
        value = factor.at(now + at)
        assert LEAST <= value <= 1.0
        assert value >= last
        last = value
    assert factor.at(now + 150.0 + 1e-6) == pytest.approx(1.0)


@example(gaps=[1.000000001, 30.0], at=100.0)  # where a division rounds down
@given(gaps=st.lists(st.floats(0, 30), min_size=1, max_size=10), at=st.floats(0, 200))
def test_the_next_change_is_when_it_rises_and_not_before(gaps: list[float], at: float) -> None:
    factor, now = LoadFactor(), 0.0
    for gap in gaps:
        now += gap
        factor.ran_out(now)
    now += at
    change = factor.next_change(now)
    if change is None:
        assert factor.at(now) == 1.0
        return
    assert now < change <= now + RESTORE_EVERY_S + 1e-6
    assert factor.at(change + 1e-6) > factor.at(now)
    assert factor.at((now + change) / 2) in (factor.at(now), factor.at(change + 1e-6))
