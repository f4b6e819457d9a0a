"""When the gateway collects garbage."""

import gc
from collections.abc import Iterator

import pytest
import uvicorn

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
    """Disables automatic collection, so that only the code under test collects.

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
    serving = server.DrainingServer(uvicorn.Config("no:app"), requests)
    for _ in range(2 * server.GC_WORTH_OBJECTS):
        Cycle()
    await serving.on_tick(1)
    assert cycles() == 2 * server.GC_WORTH_OBJECTS
    requests.in_flight = 0
    await serving.on_tick(2)
    assert cycles() == 0


@pytest.mark.usefixtures("by_hand")
def test_little_garbage_is_left_for_later() -> None:
    requests = Requests()
    requests.in_flight = 0
    gc.collect()
    Cycle()
    server.collect_if_idle(requests)
    assert cycles() == 1
