"""Task groups of which the first error counts."""

import asyncio

import pytest

from resilience.task_groups import all_or_error


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("the first")


async def test_a_task_whose_group_has_failed_gets_the_error_and_does_not_count_as_cancelled() -> None:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(ValueError, match="the first"):
        async with all_or_error() as group:
            group.create_task(fail())
            sleeping = group.create_task(asyncio.sleep(60))
    assert sleeping.cancelled()
    assert task.cancelling() == 0


async def test_the_cancellation_of_a_task_reaches_its_group_and_stays_a_cancellation() -> None:
    async def waits() -> None:
        async with all_or_error() as group:
            group.create_task(asyncio.sleep(60))

    task = asyncio.get_running_loop().create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelling() == 1
