"""Limits of a fallback leg: requests at once, and what they may cost within a minute."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.prices import Price
from resilience.leg_limits import WINDOW_S, LegLimit, LegLimits, LegSkipped, Permit

# One dollar per million tokens is 1,000 nano dollars per token.
PRICE = Price(input_nanousd=10**9, output_nanousd=5 * 10**9, cached_nanousd=10**8)


@dataclass
class LegLimitsRig:
    """Limits of one leg, a clock set by hand, and the events."""

    limit: LegLimit
    now: float = 0.0
    events: list[LegSkipped] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limits = LegLimits({"bedrock": self.limit}, clock=lambda: self.now, emit=self.events.append)

    def enter(self, input_tokens: int = 0, output_tokens: int = 0) -> Permit | None:
        return self.limits.enter("bedrock", input_tokens, output_tokens)

    def spend(self, input_tokens: int) -> bool:
        permit = self.enter(input_tokens)
        if permit is None:
            return False
        with permit:
            permit.settle(input_tokens)
        return True


def test_a_price_counts_cached_tokens_apart_and_rounds_up() -> None:
    assert PRICE.cost_nanousd(1000, 100, 400) == 600 * 1000 + 400 * 100 + 100 * 5000
    assert PRICE.cost_nanousd(1000, 0, 0, 100) == 1000 * 1000
    dear = Price(10**9, 5 * 10**9, 10**8, 2 * 10**9)
    assert dear.cost_nanousd(1000, 0, 400, 100) == 500 * 1000 + 400 * 100 + 100 * 2000
    assert Price(1, 1, 1).cost_nanousd(1, 0, 0) == 1
    assert PRICE.cost_nanousd(10, 0, 50) == 10 * 100, "no more is cached than was sent"


def test_a_prompt_that_may_be_written_to_a_cache_reserves_what_that_costs() -> None:
    writes = Price(10**9, 5 * 10**9, 10**8, 2 * 10**9)
    limit = LegLimit(max_spend_nanousd_per_minute=1_500_000, cost=writes.cost_nanousd)
    assert LegLimitsRig(limit).enter(1_000) is None
    assert LegLimitsRig(limit).enter(750) is not None


def test_no_more_requests_than_allowed_are_in_a_leg_at_once() -> None:
    rig = LegLimitsRig(LegLimit(max_concurrency=2))
    first, second = rig.enter(), rig.enter()
    assert first is not None and second is not None
    assert rig.enter() is None
    assert rig.events == [LegSkipped("bedrock", "concurrency")]
    with first:
        pass
    assert rig.enter() is not None


def test_the_models_of_a_pool_share_its_bounds() -> None:
    rig = LegLimitsRig(LegLimit(max_concurrency=1))
    assert rig.limits.enter("bedrock/a", 0, 0) is not None
    assert rig.limits.enter("bedrock/b", 0, 0) is None
    assert rig.events == [LegSkipped("bedrock/b", "concurrency")]


def test_a_place_is_given_back_when_the_call_fails() -> None:
    rig = LegLimitsRig(LegLimit(max_concurrency=1))
    permit = rig.enter()
    assert permit is not None
    with pytest.raises(ConnectionError), permit:
        raise ConnectionError
    assert rig.limits.figures()["bedrock"].in_use == 0


def test_the_cost_of_a_call_is_reserved_before_it_is_spent() -> None:
    rig = LegLimitsRig(LegLimit(max_spend_nanousd_per_minute=100_000, cost=PRICE.cost_nanousd))
    assert rig.enter(output_tokens=10) is not None
    assert rig.enter(output_tokens=10) is not None
    assert rig.enter(output_tokens=1) is None, "two answers of at most 50,000 are under way"
    assert rig.events == [LegSkipped("bedrock", "spend")]


def test_settling_releases_the_unused_part_of_a_reservation() -> None:
    rig = LegLimitsRig(LegLimit(max_spend_nanousd_per_minute=100_000, cost=PRICE.cost_nanousd))
    permit = rig.enter(output_tokens=20)
    assert permit is not None
    with permit:
        permit.settle(output_tokens=2)
    assert rig.limits.figures()["bedrock"].spent_nanousd == 10_000
    assert rig.enter(output_tokens=18) is not None


def test_a_call_that_never_says_what_it_cost_counts_as_its_reservation() -> None:
    rig = LegLimitsRig(LegLimit(max_spend_nanousd_per_minute=100_000, cost=PRICE.cost_nanousd))
    permit = rig.enter(output_tokens=20)
    assert permit is not None
    with permit:
        pass
    assert rig.enter(output_tokens=1) is None


def test_a_minute_later_the_money_may_be_spent_again() -> None:
    rig = LegLimitsRig(LegLimit(max_spend_nanousd_per_minute=100_000, cost=PRICE.cost_nanousd))
    assert rig.spend(60)
    rig.now = 30.0
    assert rig.spend(40)
    assert not rig.spend(1)
    rig.now = WINDOW_S - 0.1
    assert not rig.spend(1)
    rig.now = WINDOW_S + 1.0
    assert rig.spend(60)
    assert not rig.spend(1)


def test_a_leg_without_limits_lets_everything_in() -> None:
    rig = LegLimitsRig(LegLimit(max_concurrency=1))
    assert all(rig.limits.enter("other", 10**9, 0) is not None for _ in range(1000))
    assert rig.events == []


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=200)
)
def test_no_window_of_a_minute_ever_costs_more_than_allowed(calls: list[tuple[float, int, int]]) -> None:
    """Costs never exceed reservations here, as with a backend that keeps to `max_tokens`."""
    rig = LegLimitsRig(LegLimit(max_spend_nanousd_per_minute=100_000, cost=PRICE.cost_nanousd))
    paid: list[tuple[float, int]] = []
    for wait, asked, used in calls:
        rig.now += wait
        permit = rig.enter(asked)
        if permit is None:
            continue
        used = min(asked, used)
        with permit:
            permit.settle(used)
        paid.append((rig.now, used * 1000))
        window = sum(cost for when, cost in paid if when > rig.now - WINDOW_S)
        assert window <= 100_000
        assert rig.limits.figures()["bedrock"].reserved_nanousd == 0
