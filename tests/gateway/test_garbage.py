"""When the gateway collects garbage."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from gateway import server


class Requests:
    """The number of requests in flight, set by hand."""

    in_flight = 1


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def cycles() -> int:
    return sum(type(one) is Cycle for one in gc.get_objects())  # isinstance() fails for a dead weak proxy


@pytest.fixture
def by_hand() -> Iterator[None]:
    """Disables automatic collection, so that only the task under test collects.

    Objects that are there already are left out of each look for objects: in a test process they are a million.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("by_hand")
async def test_garbage_is_collected_once_no_request_is_in_flight() -> None:
    requests = Requests()
    async with asyncio.TaskGroup() as tasks:
        collecting = tasks.create_task(server.collect_when_idle(requests, every_s=0.001))
        for _ in range(2 * server.GC_WORTH_OBJECTS):
            Cycle()
        await asyncio.sleep(0.05)
        assert cycles() == 2 * server.GC_WORTH_OBJECTS
        requests.in_flight = 0
        async with asyncio.timeout(10):
            while cycles():  # noqa: ASYNC110  # a collection reports nothing
                await asyncio.sleep(0.001)
        collecting.cancel()


@pytest.mark.usefixtures("by_hand")
async def test_little_garbage_is_left_for_later() -> None:
    requests = Requests()
    requests.in_flight = 0
    async with asyncio.TaskGroup() as tasks:
        collecting = tasks.create_task(server.collect_when_idle(requests, every_s=0.001))
        await asyncio.sleep(0.02)
        gc.collect()
        Cycle()
        await asyncio.sleep(0.05)
        assert cycles() == 1
        collecting.cancel()
