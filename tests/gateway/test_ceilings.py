"""A key without limits of its own cannot occupy a whole process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accounting.keys import Budget, CallerRole, KeyLimits
from gateway.config.settings import Settings
from gateway.contracts.values import Caller
from gateway.errors import RateLimited
from gateway.keys.ceilings import Ceilings

CALLER = Caller("acme", CallerRole.CALLER, "key_1")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_requests_and_tokens_of_a_minute_are_counted_for_each_key() -> None:
    clock = Clock()
    ceilings = Ceilings(KeyLimits(2, 100), None, clock=clock)
    other = replace(CALLER, key_id="key_2")
    for caller in (CALLER, other):
        ceilings.count_request(caller)
        ceilings.count_request(caller)
        ceilings.count_use(caller, 60)
    clock.now += 20.5
    with pytest.raises(
        RateLimited, match=r"requests_per_minute: .* is 2; too little is left now; try again in 40 s"
    ) as refused:
        ceilings.count_request(CALLER)
    assert refused.value.retry_after_ms == 39_500
    with pytest.raises(RateLimited, match="tokens_per_minute: the request needs 60"):
        ceilings.count_use(CALLER, 60)
    ceilings.count_use(CALLER, 40)
    clock.now += 40.0
    ceilings.count_request(CALLER)
    ceilings.count_use(CALLER, 60)


def test_money_of_a_minute_is_counted_for_keys_without_a_budget() -> None:
    clock = Clock()
    ceilings = Ceilings(KeyLimits(), None, clock=clock, nanousd_per_minute=2 * 10**9)
    ceilings.count_use(CALLER, 0, lambda: 15 * 10**8)
    with pytest.raises(
        RateLimited, match=r"usd_per_minute: the request needs 0\.6, .* is 2; too little is left"
    ):
        ceilings.count_use(CALLER, 0, lambda: 6 * 10**8)
    for free in (replace(CALLER, budget=Budget(1)), replace(CALLER, role=CallerRole.ADMIN)):
        ceilings.count_use(free, 0, lambda: 10**12)
    clock.now += 60.0
    ceilings.count_use(CALLER, 0, lambda: 6 * 10**8)


def test_without_a_ceiling_of_money_no_cost_is_computed() -> None:
    Ceilings(KeyLimits(), None, clock=Clock()).count_use(CALLER, 0, lambda: pytest.fail("it was computed"))


@pytest.mark.parametrize(
    ("sections", "priced"),
    [
        ({}, False),
        ({"ledger": {"prices": "prices.yaml"}}, True),
        ({"models": {"demo": {"price": {"input_usd_per_million": 1, "output_usd_per_million": 2}}}}, True),
    ],
)
def test_money_has_a_ceiling_where_something_has_a_price(sections: dict[str, Any], priced: bool) -> None:
    assert Settings.model_validate(sections).priced is priced


def test_one_request_above_the_tokens_of_a_minute_is_let_through() -> None:
    ceilings = Ceilings(KeyLimits(None, 100), None, clock=Clock())
    ceilings.count_use(CALLER, 500)
    with pytest.raises(RateLimited):
        ceilings.count_use(CALLER, 1)


def test_a_keys_requests_that_run_are_counted_until_they_end_in_whatever_way() -> None:
    ceilings = Ceilings(KeyLimits(), 2, clock=Clock())
    with (
        ceilings.running(CALLER),
        ceilings.running(CALLER),
        ceilings.running(replace(CALLER, key_id="key_2")),
        pytest.raises(RateLimited, match="concurrent_requests: 2 requests of the key run here"),
    ):
        ceilings.running(CALLER)
    with pytest.raises(ValueError, match="broken"), ceilings.running(CALLER):
        raise ValueError("broken")
    with ceilings.running(CALLER), ceilings.running(CALLER):
        pass
    assert not ceilings._running


@pytest.mark.parametrize("role", [CallerRole.FRONT, CallerRole.OPERATOR, CallerRole.ADMIN])
def test_only_callers_keys_have_ceilings(role: CallerRole) -> None:
    ceilings = Ceilings(KeyLimits(1, 1), 1, clock=Clock())
    caller = replace(CALLER, role=role)
    for _ in range(3):
        ceilings.count_request(caller)
        ceilings.count_use(caller, 5)
    with ceilings.running(caller), ceilings.running(caller):
        pass


def test_a_keys_own_limit_replaces_the_ceiling_of_its_kind() -> None:
    ceilings = Ceilings(KeyLimits(1, 1), None, clock=Clock())
    own = replace(CALLER, limits=KeyLimits(requests_per_minute=1_000, tokens_per_minute=1_000))
    for _ in range(3):
        ceilings.count_request(own)
        ceilings.count_use(own, 5)


def test_ceilings_are_on_by_default_and_each_can_be_switched_off() -> None:
    auth = Settings.model_validate({}).auth
    assert (auth.default_concurrent_requests, auth.default_requests_per_minute) == (1_024, 600_000)
    off = Settings.model_validate({"auth": {"default_concurrent_requests": None}})
    assert off.auth.default_concurrent_requests is None


def test_a_limit_of_a_day_leaves_the_ceiling_of_the_minute() -> None:
    ceilings = Ceilings(KeyLimits(None, 1), None, clock=Clock())
    daily = replace(CALLER, limits=KeyLimits(tokens_per_day=1_000))
    ceilings.count_use(daily, 5)
    with pytest.raises(RateLimited, match="tokens_per_minute"):
        ceilings.count_use(daily, 5)
