"""The retry budget: bounded over any time, fair to quiet backends, one bucket each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilience.retry_budget import RetryBudget

STEPS = st.lists(st.tuples(st.sampled_from(["attempt", "retry", "wait"]), st.floats(0, 5)), max_size=300)


@given(steps=STEPS)
def test_retries_never_exceed_what_attempts_time_and_savings_pay_for(steps: list[tuple[str, float]]) -> None:
    budget = RetryBudget(share=0.1, per_second=0.5, most=10.0)
    now, attempts, retries = 50.0, 0, 0
    for step, seconds in steps:
        if step == "wait":
            now += seconds
        elif step == "attempt":
            budget.attempted("local", now)
            attempts += 1
        else:
            retries += budget.take("local", now)
        assert retries <= 10.0 + 0.1 * attempts + 0.5 * (now - 50.0) + 1e-9
        assert 0.0 <= budget.remaining("local", now) <= 10.0


def test_under_steady_failure_a_tenth_of_the_load_is_retried() -> None:
    budget = RetryBudget(share=0.1, per_second=0.0, most=10.0)
    retries = 0
    for at in range(10_000):
        budget.attempted("local", at / 1000)
        retries += budget.take("local", at / 1000)
    assert 1000 <= retries <= 1010


def test_a_quiet_backend_may_retry_again_after_a_while() -> None:
    budget = RetryBudget(share=0.1, per_second=0.5, most=3.0)
    assert [budget.take("local", 0.0) for _ in range(4)] == [True, True, True, False]
    assert not budget.take("local", 1.9)
    assert budget.take("local", 2.0)


def test_each_backend_has_a_budget_of_its_own() -> None:
    budget = RetryBudget(most=1.0, per_second=0.0)
    assert budget.take("local", 0.0)
    assert not budget.take("local", 0.0)
    assert budget.take("bedrock", 0.0)
    assert budget.left(0.0) == {"local": 0.0, "bedrock": 0.0}


def test_a_clock_that_steps_back_gives_nothing_twice() -> None:
    budget = RetryBudget(most=1.0, per_second=1.0, share=0.0)
    assert budget.take("local", 10.0)
    assert not budget.take("local", 5.0)
    assert not budget.take("local", 10.0)
    assert budget.take("local", 11.0)
