"""Open-loop load: each request is sent when the trace says, whether or not earlier ones were answered."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from ops.replay.outcome import ReplayedRequest
from ops.replay.shape import Planned

Send = Callable[[Planned, str, float], Awaitable[ReplayedRequest]]


@dataclass(slots=True)
class ReplayRun:
    """The counts of a replay, during the run and after it; ``outcomes`` are in the order of their end."""

    outcomes: list[ReplayedRequest] = field(default_factory=list)
    sent: int = 0
    interrupted: bool = False
    wall_s: float = 0.0

    @property
    def unfinished(self) -> int:
        """Number of requests in flight; after a stop, of those that it aborted."""
        return self.sent - len(self.outcomes)


async def run_load(
    requests: Iterable[Planned],
    *,
    text: Callable[[Planned], str],
    send: Send,
    concurrency: int,
    clock: Callable[[], float],
    stop: asyncio.Event,
    run: ReplayRun,
) -> None:
    """Send all of ``requests``; fills ``run`` as it goes.

    Args:
        requests: in order of ``due_s``.
        text: makes a request's prompt; called before the request is due.
        send: sends one request; its last argument is the clock's reading at the start; never fails.
        concurrency: most requests in flight. Further due requests wait, in order; the wait is part of the
            outcome's ``client_delay_s``.
        clock: seconds, monotonic, as ``asyncio.sleep`` counts them.
        stop: when set, requests in flight are aborted and ``run.interrupted`` is true.
        run: receives the counts.
    """
    started_at = clock()
    slots = asyncio.Semaphore(concurrency)

    async def one(planned: Planned, prompt: str) -> None:
        try:
            run.outcomes.append(await send(planned, prompt, started_at))
        finally:
            slots.release()

    async def arrivals() -> None:
        async with asyncio.TaskGroup() as under_way:
            for planned in requests:
                prompt = text(planned)
                await asyncio.sleep(max(0.0, started_at + planned.due_s - clock()))
                await slots.acquire()
                run.sent += 1
                under_way.create_task(one(planned, prompt))

    try:
        async with asyncio.TaskGroup() as group:
            load, stopped = group.create_task(arrivals()), group.create_task(stop.wait())
            await asyncio.wait((load, stopped), return_when=asyncio.FIRST_COMPLETED)
            run.interrupted = not load.done()
            load.cancel()
            stopped.cancel()
    finally:
        run.wall_s = clock() - started_at
