import asyncio
from collections.abc import Callable

import pytest

from ops.replay.load import ReplayRun, run_load
from ops.replay.outcome import ReplayedRequest
from ops.replay.shape import Planned
from tests.virtual_time import in_virtual_time, loop_time


def planned(*due_s: float) -> list[Planned]:
    return [Planned(index, due, 10, 10) for index, due in enumerate(due_s)]


class Backend:
    """Serves each request in ``service_s`` and counts the concurrent ones."""

    def __init__(self, service_s: float) -> None:
        self.service_s = service_s
        self.under_way = 0
        self.most = 0
        self.sent: list[float] = []

    async def send(self, request: Planned, text: str, started_at: float) -> ReplayedRequest:
        sent_s = loop_time() - started_at
        self.sent.append(sent_s)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self.service_s)
        finally:
            self.under_way -= 1
        return ReplayedRequest(request.index, request.due_s, sent_s, 10, 10, self.service_s)


async def load(
    requests: list[Planned],
    backend: Backend,
    *,
    concurrency: int = 100,
    stop: asyncio.Event | None = None,
    text: Callable[[Planned], str] = lambda request: "",
) -> ReplayRun:
    run = ReplayRun()
    await run_load(
        requests, text=text, send=backend.send, concurrency=concurrency, clock=loop_time,
        stop=stop or asyncio.Event(), run=run,
    )  # fmt: skip
    return run


def test_arrivals_do_not_wait_for_answers() -> None:
    backend = Backend(service_s=0.5)
    run = in_virtual_time(load(planned(0.0, 0.05, 0.10, 0.15), backend))
    assert backend.most == 4
    assert backend.sent == pytest.approx([0.0, 0.05, 0.10, 0.15])
    assert (run.sent, len(run.outcomes), run.unfinished, run.interrupted) == (4, 4, 0, False)
    assert run.wall_s == pytest.approx(0.65)


def test_requests_that_wait_for_the_cap_are_sent_late_and_in_order() -> None:
    backend = Backend(service_s=0.1)
    run = in_virtual_time(load(planned(0, 0, 0, 0), backend, concurrency=1))
    assert backend.most == 1
    assert [outcome.index for outcome in run.outcomes] == [0, 1, 2, 3]
    assert [outcome.client_delay_s for outcome in run.outcomes] == pytest.approx([0, 0.1, 0.2, 0.3])


def test_a_stop_gives_up_what_is_under_way_and_keeps_what_ended() -> None:
    backend, slow, run = Backend(service_s=0.05), Backend(service_s=30), ReplayRun()

    async def send(request: Planned, text: str, started_at: float) -> ReplayedRequest:
        return await (backend if request.index == 0 else slow).send(request, text, started_at)

    async def scenario() -> None:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(
                run_load(
                    planned(0, 0, 60), text=lambda request: "", send=send, concurrency=5, clock=loop_time,
                    stop=stop, run=run,
                )
            )  # fmt: skip
            await asyncio.sleep(0.2)
            stop.set()

    in_virtual_time(scenario())
    assert run.interrupted
    assert (run.sent, len(run.outcomes), run.unfinished) == (2, 1, 1)
    assert slow.under_way == 0
    assert run.wall_s == pytest.approx(0.2)


def test_a_stop_while_waiting_for_the_cap_ends_at_once() -> None:
    backend = Backend(service_s=30)

    async def scenario() -> ReplayRun:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(load(planned(0, 0), backend, concurrency=1, stop=stop))
            await asyncio.sleep(0.05)
            stop.set()
        return running.result()

    run = in_virtual_time(scenario())
    assert run.interrupted
    assert run.sent == 1
    assert run.wall_s == pytest.approx(0.05)


def test_a_cancelled_replay_leaves_no_request_behind() -> None:
    backend = Backend(service_s=30)

    async def scenario() -> None:
        async with asyncio.timeout(0.1):
            await load(planned(0, 0, 0), backend)

    with pytest.raises(TimeoutError):
        in_virtual_time(scenario())
    assert backend.sent and backend.under_way == 0
