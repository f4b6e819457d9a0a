import asyncio
import time
from collections.abc import Callable

from gateway.replay.load import Run, run_load
from gateway.replay.outcome import Outcome
from gateway.replay.shape import Planned


def planned(*due_s: float) -> list[Planned]:
    return [Planned(index, due, 10, 10) for index, due in enumerate(due_s)]


class Backend:
    """Takes ``service_s`` for each request and keeps count of those under way."""

    def __init__(self, service_s: float) -> None:
        self.service_s = service_s
        self.under_way = 0
        self.most = 0
        self.sent: list[float] = []

    async def send(self, request: Planned, text: str, started_at: float) -> Outcome:
        sent_s = time.monotonic() - started_at
        self.sent.append(sent_s)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self.service_s)
        finally:
            self.under_way -= 1
        return Outcome(request.index, request.due_s, sent_s, 10, 10, self.service_s)


async def load(
    requests: list[Planned],
    backend: Backend,
    *,
    concurrency: int = 100,
    stop: asyncio.Event | None = None,
    text: Callable[[Planned], str] = lambda request: "",
) -> Run:
    run = Run()
    await run_load(
        requests, text=text, send=backend.send, concurrency=concurrency, clock=time.monotonic,
        stop=stop or asyncio.Event(), run=run,
    )  # fmt: skip
    return run


async def test_arrivals_do_not_wait_for_answers() -> None:
    backend = Backend(service_s=0.5)
    run = await load(planned(0.0, 0.05, 0.10, 0.15), backend)
    assert backend.most == 4
    assert all(
        late < 0.04
        for late in (sent - due for sent, due in zip(backend.sent, (0, 0.05, 0.1, 0.15), strict=True))
    )
    assert (run.sent, len(run.outcomes), run.in_flight, run.interrupted) == (4, 4, 0, False)


async def test_what_waits_for_the_cap_is_sent_late_in_order_and_the_delay_shows() -> None:
    backend = Backend(service_s=0.1)
    run = await load(planned(0, 0, 0, 0), backend, concurrency=1)
    assert backend.most == 1
    assert [outcome.index for outcome in run.outcomes] == [0, 1, 2, 3]
    delays = [outcome.client_delay_s for outcome in run.outcomes]
    assert delays[0] < 0.05
    assert 0.25 < delays[3] < 0.6


async def test_a_stop_gives_up_what_is_under_way_and_keeps_what_ended() -> None:
    backend, stop = Backend(service_s=0.05), asyncio.Event()
    slow = Backend(service_s=30)

    async def send(request: Planned, text: str, started_at: float) -> Outcome:
        return await (backend if request.index == 0 else slow).send(request, text, started_at)

    run = Run()
    async with asyncio.TaskGroup() as group:
        group.create_task(
            run_load(
                planned(0, 0, 60), text=lambda request: "", send=send, concurrency=5, clock=time.monotonic,
                stop=stop, run=run,
            )
        )  # fmt: skip
        await asyncio.sleep(0.2)
        stop.set()
    assert run.interrupted
    assert (run.sent, len(run.outcomes), run.unfinished) == (2, 1, 1)
    assert slow.under_way == 0
    assert run.wall_s < 5


async def test_a_stop_while_waiting_for_the_cap_ends_at_once() -> None:
    backend, stop = Backend(service_s=30), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(load(planned(0, 0), backend, concurrency=1, stop=stop))
        await asyncio.sleep(0.05)
        stop.set()
    assert running.result().interrupted
    assert running.result().sent == 1


async def test_a_cancelled_replay_leaves_no_request_behind() -> None:
    backend = Backend(service_s=30)
    try:
        async with asyncio.timeout(0.1):
            await load(planned(0, 0, 0), backend)
    except TimeoutError:
        pass
    assert backend.under_way == 0
