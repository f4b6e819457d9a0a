"""Time limits of many tasks on few timers."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.time_limits import LATENESS, OnTime, TimeLimit, TimeLimits
from tests.virtual_time import VirtualTimeLoop, loop_time, virtual_time


async def test_a_block_that_ends_in_time_is_left_alone() -> None:
    limits = TimeLimits()
    with TimeLimit(limits, 0.02) as limit:
        pass
    await asyncio.sleep(0.05)
    assert not limit.expired


async def test_a_block_that_takes_too_long_is_cancelled_and_raises_a_timeout() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError), TimeLimit(TimeLimits(), 0.02) as limit:
        await asyncio.sleep(60)
    assert limit.expired and 0.019 < time.monotonic() - began < 30
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_no_time_at_all_ends_the_block_at_its_first_wait() -> None:
    with pytest.raises(TimeoutError), TimeLimit(TimeLimits(), -1.0):
        await asyncio.sleep(60)


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def work() -> None:
        with TimeLimit(TimeLimits(), 60.0):
            await asyncio.sleep(60)

    task = asyncio.create_task(work())  # noqa: TID251 the test cancels it
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_of_two_nested_limits_the_one_that_expires_raises() -> None:
    limits = TimeLimits()
    with TimeLimit(limits, 60.0) as outer:
        with pytest.raises(TimeoutError), TimeLimit(limits, 0.01):
            await asyncio.sleep(60)
        await asyncio.sleep(0)
    assert not outer.expired


async def test_an_end_that_moves_is_read_when_the_first_end_has_come() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError), TimeLimit(TimeLimits(), 0.02, lambda: 0.1):
        await asyncio.sleep(60)
    assert time.monotonic() - began > 0.11


async def test_limits_that_end_at_about_one_time_share_a_timer() -> None:
    loop, limits, timers = asyncio.get_running_loop(), TimeLimits(), 0
    plain = loop.call_at

    def counting(*args: object, **more: object) -> object:
        nonlocal timers
        timers += 1
        return plain(*args, **more)  # type: ignore[arg-type]

    loop.call_at = counting  # type: ignore[assignment,method-assign]
    for _ in range(1000):
        with TimeLimit(limits, 300.0):
            pass
    assert timers <= 3


@given(st.floats(0.001, 86_400.0))
async def test_no_limit_ends_early_and_none_later_than_stated(after_s: float) -> None:
    limits, loop = TimeLimits(), asyncio.get_running_loop()
    before = loop.time()
    with TimeLimit(limits, after_s):
        after, [at] = loop.time(), limits.ending
    assert before + after_s - 1e-6 <= at <= after + after_s * (1 + LATENESS) + 1e-6


async def _taken_s(on_time: OnTime) -> float:
    began = loop_time()
    with pytest.raises(TimeoutError), TimeLimit(TimeLimits(), on_time.step_s, on_time):
        await asyncio.sleep(60)
    return loop_time() - began


@virtual_time
async def test_a_limit_on_an_answer_from_elsewhere_ends_in_a_loop_that_is_on_time() -> None:
    assert await _taken_s(OnTime(0.25, 20.0)) == pytest.approx(0.25, rel=LATENESS)


@virtual_time
async def test_time_in_which_the_loop_is_late_does_not_count_and_is_bounded() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.call_later(0.01, loop.block, 0.8)
    assert 1.1 < await _taken_s(OnTime(0.3, 60.0)) < 1.15, "0.3 s after the loop was held up"
    loop.call_later(0.01, loop.block, 0.8)
    assert 0.8 <= await _taken_s(OnTime(30.0, 0.5)) < 0.9


@virtual_time
async def test_time_in_which_what_is_limited_waits_in_this_process_does_not_count_and_is_bounded() -> None:
    begun = loop_time()
    assert 0.4 < await _taken_s(OnTime(0.1, 60.0, lambda: loop_time() - begun < 0.4)) < 0.7
    assert 0.3 < await _taken_s(OnTime(0.1, 0.4, lambda: True)) < 0.6
