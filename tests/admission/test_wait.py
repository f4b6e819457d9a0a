"""The wait estimate: learned, plain, bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.wait import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    ServiceTime,
    estimate_wait_s,
    retry_after_s,
    turnover_s,
)


def test_the_first_answer_is_the_mean() -> None:
    service = ServiceTime()
    assert service.mean_s == 0.0
    service.learn(4.0)
    assert service.mean_s == 4.0


def test_the_mean_follows_a_change_of_regime_within_some_forty_answers() -> None:
    service = ServiceTime()
    for _ in range(100):
        service.learn(1.0)
    for _ in range(40):
        service.learn(3.0)
    assert service.mean_s == pytest.approx(3.0, abs=0.05)


def test_one_odd_answer_moves_a_settled_mean_by_a_tenth() -> None:
    service = ServiceTime()
    for _ in range(50):
        service.learn(1.0)
    service.learn(11.0)
    assert service.mean_s == pytest.approx(2.0)


@given(st.lists(st.floats(-5, 100), min_size=1))
def test_the_mean_stays_between_the_samples_and_is_never_negative(samples: list[float]) -> None:
    service = ServiceTime()
    for sample in samples:
        service.learn(sample)
    assert -1e-9 <= service.mean_s <= max(0.0, *samples, 0.0) + 1e-9


def test_the_wait_is_one_turnover_for_each_ahead() -> None:
    assert estimate_wait_s(16, 4.0, 32) == pytest.approx(2.0)
    assert turnover_s(4.0, 32) == pytest.approx(0.125)


@pytest.mark.parametrize(("mean_s", "capacity"), [(0.0, 32), (4.0, 0)])
def test_what_cannot_be_told_counts_as_no_wait(mean_s: float, capacity: int) -> None:
    assert estimate_wait_s(50, mean_s, capacity) == 0.0


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_trying_again_makes_sense_after_the_wait_within_bounds(wait_s: float, one_turnover_s: float) -> None:
    again_s = retry_after_s(wait_s, one_turnover_s)
    assert MIN_RETRY_AFTER_S <= again_s <= MAX_RETRY_AFTER_S
    assert again_s >= min(wait_s, MAX_RETRY_AFTER_S)
