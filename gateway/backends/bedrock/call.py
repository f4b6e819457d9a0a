"""One call's way from its thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque

from gateway.backends.bedrock.values import Event
from gateway.backends.bedrock.wire import Wire, WireCut
from resilience.failures import BackendFailure

# Events that may wait for a slow reader; then the thread stops reading, and TCP holds Bedrock back.
MAX_EVENTS = 256


class EventBatches:
    """Hands events over in batches: one wake-up of the loop fetches all that is there.

    ``put`` and ``end`` belong to the thread, the rest to the loop. The lock is held for a few statements at a
    time and never while anything is waited for, so the loop may take it.

    Args:
        loop: the event loop that the answer is wanted on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.wire = Wire()
        self._loop = loop
        self._room = threading.Condition()
        self._events: deque[Event] = deque()
        self._failure: BackendFailure | None = None
        self._over = False
        self._waking = False
        self._news = asyncio.Event()
        self._gone = asyncio.Event()

    def put(self, event: Event) -> None:
        """Hand over an event; waits while too many are there.

        Raises:
            WireCut: nobody wants the answer any more.
        """
        with self._room:
            self._room.wait_for(lambda: len(self._events) < MAX_EVENTS or self.wire.is_cut)
            if self.wire.is_cut:
                raise WireCut
            self._events.append(event)
            self._wake()

    def end(self, failure: BackendFailure | None) -> None:
        """There is nothing more to come."""
        with self._room:
            self._over, self._failure = True, failure
            self._wake()

    def _wake(self) -> None:
        if not self._waking:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self._news.set)

    async def take(self) -> tuple[list[Event], bool]:
        """What has come since, at least something; and whether that was all.

        Raises:
            BackendFailure: how the call failed, once everything before it has been taken.
        """
        await self._news.wait()
        self._news.clear()
        with self._room:
            events, over, self._waking = list(self._events), self._over, False
            self._events.clear()
            self._room.notify()
            if over:
                self._news.set()
        if over and not events and self._failure is not None:
            raise self._failure
        return events, over and self._failure is None

    def cut(self) -> None:
        """Give the call up: what its thread reads or waits for ends at once."""
        self.wire.cut()
        with self._room:
            self._room.notify()

    def left(self) -> None:
        """The thread has left the call (told on the loop)."""
        self._gone.set()

    async def gone(self, timeout_s: float) -> bool:
        """Wait until the thread has left; whether it has."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._gone.wait()
        except TimeoutError:
            return False
        return True
