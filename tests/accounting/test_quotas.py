"""Limits of keys: exact in any period, reserved before, corrected after."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.keys import KeyLimits
from accounting.quotas import DAY_S, Excess, Quotas, Reservation, Window

PER_MINUTE = KeyLimits(requests_per_minute=3)
TOKENS = KeyLimits(tokens_per_minute=100, tokens_per_day=250)


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock) -> Quotas:
    return Quotas(clock=clock)


def held(quotas: Quotas, tokens: int, limits: KeyLimits = TOKENS, key: str = "a") -> Reservation:
    got = quotas.reserve(key, limits, tokens)
    assert isinstance(got, Reservation), got
    return got


def refused(quotas: Quotas, tokens: int, limits: KeyLimits = TOKENS, key: str = "a") -> Excess:
    got = quotas.reserve(key, limits, tokens)
    assert isinstance(got, Excess)
    return got


@given(
    limit=st.integers(1, 20),
    pauses=st.lists(st.floats(0.0, 30.0, allow_nan=False), min_size=1, max_size=80),
)
def test_no_minute_ever_holds_more_requests_than_the_limit_and_what_may_pass_passes(
    limit: int, pauses: list[float]
) -> None:
    clock = Clock()
    quotas, limits = Quotas(clock=clock), KeyLimits(requests_per_minute=limit)
    passed: list[float] = []
    for pause in pauses:
        clock.now += pause
        recent = [at for at in passed if clock.now - at < 60.0]
        lately = [at for at in passed if clock.now - at < 61.0]
        excess = quotas.enter("a", limits)
        if excess is None:
            assert len(recent) < limit
            passed.append(clock.now)
        else:
            assert len(lately) >= limit, "one step late at most"
            assert excess.wait_s is not None and 0 < excess.wait_s <= 61.0


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0.0, 20.0, allow_nan=False)), max_size=40))
def test_after_the_wait_that_was_told_the_request_passes(asked: list[tuple[int, float]]) -> None:
    clock = Clock()
    window = Window(100, 60.0, 60)
    for amount, pause in asked:
        clock.now += pause
        if window.remaining(clock.now) < amount:
            wait_s = window.wait_s(amount, clock.now)
            assert wait_s is not None and wait_s > 0
            assert window.remaining(clock.now + wait_s + 1e-6) >= amount
            clock.now += wait_s + 1e-6
        window.use(amount, clock.now)


def test_keys_do_not_share_their_limits(quotas: Quotas) -> None:
    assert [quotas.enter("a", PER_MINUTE) is None for _ in range(4)] == [True, True, True, False]
    assert quotas.enter("b", PER_MINUTE) is None


def test_a_refused_request_counts_for_nothing(quotas: Quotas, clock: Clock) -> None:
    for _ in range(50):
        quotas.enter("a", PER_MINUTE)
    clock.now += 61.0
    assert quotas.enter("a", PER_MINUTE) is None
    held(quotas, 90)
    assert refused(quotas, 11).name == "tokens_per_minute"
    held(quotas, 10)


def test_what_is_reserved_is_held_and_what_was_not_used_comes_back(quotas: Quotas) -> None:
    first = held(quotas, 90)
    assert refused(quotas, 20).asked == 20
    first.settle(30)
    first.settle(0)
    assert quotas.figures("a", TOKENS)["tokens"].remaining == 70
    held(quotas, 70)


def test_nothing_is_to_be_waited_for_when_nothing_was_used(quotas: Quotas) -> None:
    held(quotas, 90).settle(0)
    assert quotas.figures("a", TOKENS)["tokens"].reset_s == 0


def test_the_day_is_counted_beside_the_minute(quotas: Quotas, clock: Clock) -> None:
    for _ in range(2):
        held(quotas, 100)
        clock.now += 61.0
    assert quotas.figures("a", TOKENS)["tokens"].limit == 250, "the one that leaves less is told"
    excess = refused(quotas, 60)
    assert excess.name == "tokens_per_day" and excess.wait_s is not None and excess.wait_s > 80_000
    held(quotas, 50)
    clock.now += DAY_S + 600.0
    held(quotas, 100)


def test_what_is_over_the_limit_by_itself_never_passes(quotas: Quotas) -> None:
    assert refused(quotas, 101) == Excess("tokens_per_minute", 100, 101, None)


def test_a_reservation_that_ends_after_its_window_changes_nothing(quotas: Quotas, clock: Clock) -> None:
    late = held(quotas, 100, KeyLimits(tokens_per_minute=100))
    clock.now += 120.0
    limits = KeyLimits(tokens_per_minute=100)
    held(quotas, 40, limits)
    late.settle(5)
    assert quotas.figures("a", limits)["tokens"].remaining == 60


def test_the_figures_say_when_all_is_free_again(quotas: Quotas, clock: Clock) -> None:
    clock.now = 1_000.5
    quotas.enter("a", PER_MINUTE)
    figures = quotas.figures("a", PER_MINUTE)
    assert set(figures) == {"requests"}
    assert (figures["requests"].limit, figures["requests"].remaining) == (3, 2)
    assert math.isclose(figures["requests"].reset_s, 60.5)


def test_the_number_of_keys_that_are_counted_is_bounded(clock: Clock) -> None:
    quotas = Quotas(clock=clock, max_keys=2)
    limits = KeyLimits(requests_per_minute=1)
    assert all(quotas.enter(key, limits) is None for key in ("a", "b", "c"))
    assert quotas.enter("c", limits) is not None and quotas.enter("a", limits) is None
