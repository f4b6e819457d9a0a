"""The commit buffer: the first chunks of a stream are held briefly, so that a failed start is not sent."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.backends.port import DeltaSink
from gateway.contracts.events import Delta
from resilience.task_groups import all_or_error

T = TypeVar("T")


class CommitBuffer:
    """Holds chunks until there are ``chunks`` of them, or the first is ``seconds`` old.

    ``send`` gets the committed chunks. Held ones can still be discarded; after the first commit none is held.
    """

    def __init__(self, send: DeltaSink, *, chunks: int, seconds: float, clock: Callable[[], float]) -> None:
        self._send = send
        self._chunks = chunks
        self._seconds = seconds
        self._clock = clock
        self._held: list[Delta] = []
        self._since = 0.0
        self._first = asyncio.Event()
        self._lock = asyncio.Lock()
        self.holding = True

    async def take(self, delta: Delta) -> None:
        """Hold a chunk, or send all held chunks and this one."""
        self._held.append(delta)
        if not self._first.is_set():
            self._since = self._clock()
            self._first.set()
        late = not self.holding or self._clock() - self._since >= self._seconds
        if late or len(self._held) >= self._chunks:
            await self.commit()

    async def commit(self) -> None:
        """Send the held chunks in order, and hold none from now on."""
        async with self._lock:
            while self._held:
                try:
                    await self._send(self._held.pop(0))
                except asyncio.CancelledError:
                    self._held.clear()  # without that chunk they would leave a hole
                    raise
            self.holding = False

    def discard(self) -> None:
        self._held.clear()
        self._first.clear()

    async def run(self, work: Awaitable[T]) -> T:
        """Await ``work``, and commit in time even if no further chunk arrives."""
        failure: Exception | None = None
        async with all_or_error() as tasks:
            timer = tasks.create_task(self._commit_in_time(), name="commit")
            try:
                result = await work
            except Exception as error:
                failure = error  # raised here, it would cancel a chunk that is being sent
            if not self._lock.locked():
                timer.cancel()
        if failure is not None:
            raise failure
        return result

    async def _commit_in_time(self) -> None:
        await self._first.wait()
        await asyncio.sleep(self._seconds)
        await self.commit()
