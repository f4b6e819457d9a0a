"""Key limits: exact in any period, held before a request, corrected after it, too strict by one step at most."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.keys import KeyLimits
from accounting.quotas import (
    LIMITS,
    MAX_HOLD_S,
    RETRY_HELD_S,
    Excess,
    Figures,
    HoldId,
    KeyUsage,
    QuotaRequest,
    Quotas,
    QuotaVerdict,
    QuotaWindow,
    Settlement,
)
from accounting.values import DAY_S

PER_MINUTE = KeyLimits(requests_per_minute=3)
TOKENS = KeyLimits(tokens_per_minute=100, tokens_per_day=250)


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


class QuotaRig:
    """The usage counts of one process, called as the gateway calls them."""

    def __init__(self, **bounds: int) -> None:
        self.clock = Clock()
        self.quotas = Quotas(clock=self.clock, **bounds)
        self._numbers = itertools.count(1)

    def enter(self, key: str, limits: KeyLimits) -> Excess | None:
        return self.quotas.take(key, limits, QuotaRequest(requests=1)).excess

    def hold(self, tokens: int, limits: KeyLimits = TOKENS, key: str = "a") -> tuple[HoldId, QuotaVerdict]:
        hold = HoldId("me", next(self._numbers))
        return hold, self.quotas.take(key, limits, QuotaRequest(tokens=tokens, hold=hold))

    def held(self, tokens: int, limits: KeyLimits = TOKENS) -> HoldId:
        hold, verdict = self.hold(tokens, limits)
        assert verdict.excess is None
        return hold

    def refused(self, tokens: int) -> Excess:
        excess = self.hold(tokens)[1].excess
        assert excess is not None
        return excess

    def settle(self, hold: HoldId, used: int, limits: KeyLimits = TOKENS) -> None:
        self.quotas.settle(Settlement("a", limits, hold, None, used))

    def figures(self, limits: KeyLimits = TOKENS) -> tuple[Figures | None, ...]:
        return self.quotas.take("a", limits, QuotaRequest()).figures

    def remaining(self, limits: KeyLimits = TOKENS) -> int:
        return min(one.remaining for one in self.figures(limits) if one is not None)


@pytest.fixture
def rig() -> QuotaRig:
    return QuotaRig()


@given(
    limit=st.integers(1, 20),
    pauses=st.lists(st.floats(0.0, 30.0, allow_nan=False), min_size=1, max_size=80),
)
def test_no_minute_ever_holds_more_requests_than_the_limit_and_what_may_pass_passes(
    limit: int, pauses: list[float]
) -> None:
    rig, limits = QuotaRig(), KeyLimits(requests_per_minute=limit)
    passed: list[float] = []
    for pause in pauses:
        rig.clock.now += pause
        recent = [at for at in passed if rig.clock.now - at < 60.0]
        lately = [at for at in passed if rig.clock.now - at < 61.0]
        excess = rig.enter("a", limits)
        if excess is None:
            assert len(recent) < limit
            passed.append(rig.clock.now)
        else:
            assert len(lately) >= limit, "one step late at most"
            assert excess.wait_s is not None and 0 < excess.wait_s <= 61.0


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0.0, 20.0, allow_nan=False)), max_size=40))
def test_a_request_passes_after_the_wait_that_its_refusal_gave(asked: list[tuple[int, float]]) -> None:
    now = 1_000.0
    window = QuotaWindow(100, LIMITS[1])
    for amount, pause in asked:
        now += pause
        if window.remaining(now) < amount:
            wait_s = window.wait_s(amount, now)
            assert wait_s is not None and wait_s > 0
            assert window.remaining(now + wait_s + 1e-6) >= amount
            now += wait_s + 1e-6
        window.add(amount, now, now)


@given(
    st.lists(
        st.tuples(st.sampled_from(["hold", "settle", "look"]), st.integers(1, 120), st.floats(0.0, 30.0)),
        max_size=60,
    )
)
def test_usage_that_was_stored_and_loaded_decides_as_before(steps: list[tuple[str, int, float]]) -> None:
    """A store encodes and loads the usage between two requests."""
    living, stored, now = KeyUsage(TOKENS), KeyUsage(TOKENS).encode(), 1_000.0
    holds: list[HoldId] = []
    for number, (what, amount, pause) in enumerate(steps):
        now += pause
        loaded = KeyUsage(TOKENS, stored)
        if what == "settle" and holds:
            settlement = Settlement("a", TOKENS, holds.pop(0), None, min(amount, 100))
            living.settle(settlement, now)
            loaded.settle(settlement, now)
        else:
            hold = HoldId("me", number)
            ask = QuotaRequest(tokens=amount, hold=hold) if what == "hold" else QuotaRequest()
            verdict = living.take(ask, now)
            assert loaded.take(ask, now) == verdict
            if what == "hold" and verdict.excess is None:
                holds.append(hold)
        stored = loaded.encode()


def test_a_clock_that_is_set_back_by_hours_does_not_lengthen_a_minute(rig: QuotaRig) -> None:
    rig.clock.now = 20_000.0
    assert [rig.enter("a", PER_MINUTE) is None for _ in range(4)] == [True, True, True, False]
    rig.clock.now = 2_000.0
    assert rig.enter("a", PER_MINUTE) is not None, "what was used still counts"
    rig.clock.now += 61.0
    assert rig.enter("a", PER_MINUTE) is None


def test_keys_do_not_share_their_limits(rig: QuotaRig) -> None:
    assert [rig.enter("a", PER_MINUTE) is None for _ in range(4)] == [True, True, True, False]
    assert rig.enter("b", PER_MINUTE) is None


def test_a_refused_request_counts_for_nothing(rig: QuotaRig) -> None:
    for _ in range(50):
        rig.enter("a", PER_MINUTE)
    rig.clock.now += 61.0
    assert rig.enter("a", PER_MINUTE) is None
    rig.held(90)
    assert rig.refused(11).name == "tokens_per_minute"
    rig.held(10)


def test_held_tokens_are_reserved_and_unused_ones_are_returned(rig: QuotaRig) -> None:
    first = rig.held(90)
    assert rig.refused(20).asked == 20
    rig.settle(first, 30)
    rig.settle(first, 0)
    assert rig.remaining() == 70
    rig.held(70)


def test_nothing_is_to_be_waited_for_when_nothing_was_used(rig: QuotaRig) -> None:
    rig.settle(rig.held(90), 0)
    assert [one.reset_s for one in rig.figures() if one is not None] == [0, 0]


def test_the_day_is_counted_beside_the_minute(rig: QuotaRig) -> None:
    for _ in range(2):
        rig.settle(rig.held(100), 100)
        rig.clock.now += 61.0
    assert rig.remaining() == 50
    excess = rig.refused(60)
    assert excess.name == "tokens_per_day" and excess.wait_s is not None and excess.wait_s > 80_000
    rig.held(50)
    rig.clock.now += DAY_S + 600.0
    rig.held(100)


def test_a_request_refused_because_of_holds_is_told_to_retry_soon(rig: QuotaRig) -> None:
    rig.held(100)
    assert rig.refused(10).wait_s == RETRY_HELD_S
    rig.clock.now += 61.0
    rig.settle(rig.held(100), 95)
    assert rig.refused(10).wait_s == 61.0


def test_what_is_over_the_limit_by_itself_never_passes(rig: QuotaRig) -> None:
    assert rig.refused(101) == Excess("tokens_per_minute", 100, 101, None)


def test_use_counts_when_it_was_held_so_a_long_answer_does_not_block_the_next_minute(rig: QuotaRig) -> None:
    limits = KeyLimits(tokens_per_minute=100)
    late = rig.held(100, limits)
    rig.clock.now += 120.0
    rig.held(40, limits)
    rig.settle(late, 5, limits)
    assert rig.remaining(limits) == 60


def test_the_holds_of_a_dead_process_no_longer_count() -> None:
    tally, now = KeyUsage(TOKENS), 1_000.0
    assert tally.take(QuotaRequest(tokens=100, hold=HoldId("gone", 1)), now).excess is None
    ask = QuotaRequest(tokens=100, hold=HoldId("me", 1))
    assert tally.take(ask, now, alive=lambda _: True).excess is not None
    assert tally.take(ask, now, alive=lambda holder: holder == "me").excess is None


def test_what_is_never_settled_is_held_for_a_day_at_most(rig: QuotaRig) -> None:
    limits = KeyLimits(tokens_per_day=100)
    rig.held(100, limits)
    rig.clock.now += MAX_HOLD_S + 600.0
    assert rig.remaining(limits) == 100


def test_what_was_used_and_is_held_counts_under_changed_limits_too(rig: QuotaRig) -> None:
    raised = KeyLimits(tokens_per_minute=300)
    held = rig.held(40)
    assert rig.remaining(raised) == 260
    rig.settle(rig.held(30, raised), 10, raised)
    rig.settle(held, 20)
    assert [None if one is None else one.remaining for one in rig.figures(raised)] == [None, 270, None]


def test_requests_admitted_elsewhere_are_counted_even_beyond_the_limits(rig: QuotaRig) -> None:
    for _ in range(9):
        rig.quotas.count("a", PER_MINUTE, QuotaRequest(requests=1))
    assert rig.enter("a", PER_MINUTE) is not None


def test_the_figures_say_when_all_is_free_again(rig: QuotaRig) -> None:
    rig.clock.now = 1_000.5
    rig.enter("a", PER_MINUTE)
    requests, *others = rig.figures(PER_MINUTE)
    assert requests is not None and others == [None, None]
    assert (requests.limit, requests.remaining) == (3, 2)
    assert math.isclose(requests.reset_s, 60.5)


def test_the_number_of_keys_that_are_counted_is_bounded() -> None:
    rig, limits = QuotaRig(max_keys=2), KeyLimits(requests_per_minute=1)
    assert all(rig.enter(key, limits) is None for key in ("a", "b", "c"))
    assert rig.enter("c", limits) is not None and rig.enter("a", limits) is None


def test_what_each_limit_counts_is_in_one_order_everywhere() -> None:
    assert [one.name for one in LIMITS] == list(KeyLimits.__dataclass_fields__)
