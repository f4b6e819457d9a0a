"""One call to Bedrock between its thread and the event loop: bulkhead, connection, events."""

import asyncio
import contextlib
import socket
import threading
from collections import deque

from gateway.backends.bedrock.answer import Event
from resilience.failures import BackendFailure, FailureKind

# Most calls that wait for a lane. Admission passes as many calls as there are lanes, and a few more.
MAX_WAITING = 16
RETRY_AFTER_S = 1.0  # Retry-After when no place is left, seconds: calls end one by one
# Events that may wait for a slow reader; then the thread stops reading, and TCP slows Bedrock down.
MAX_EVENTS = 256
# Longest wait, seconds, for the thread of a call that was cut or is complete. A thread that takes longer
# keeps its lane until the read timeout ends it.
THREAD_END_WAIT_S = 0.5


class Lanes:
    """The bulkhead: ``count`` calls at once. A lane is free once its thread ends, not its caller."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.waiting = 0
        self.busy = 0
        self._free = asyncio.Semaphore(count)

    async def enter(self) -> None:
        """Take a lane, in the order of arrival. Raises BackendFailure when too many wait already."""
        if self._free.locked() and self.waiting >= MAX_WAITING:
            raise BackendFailure(
                FailureKind.THROTTLED,
                f"max_concurrency ({self.count}) calls to Bedrock are under way, and {self.waiting} wait",
                retry_after_s=RETRY_AFTER_S,
            )
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.busy += 1

    def leave(self) -> None:
        self.busy -= 1
        self._free.release()


class WireCut(Exception):
    """The call was given up; nothing more is to be sent or read."""


class Wire:
    """The socket that a call uses at the moment; another thread may shut it down.

    A shutdown ends a read in which the call's thread waits. The socket is not closed: another connection must
    not get its descriptor while a thread still reads from it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.is_cut = False

    def hold(self, sock: socket.socket) -> None:
        """Set the socket that the call is about to use. Raises WireCut when the call was given up."""
        with self._lock:
            if self.is_cut:
                raise WireCut
            self._socket = sock

    def release(self) -> None:
        """Drop the socket: the call is over, and its connection may serve another one."""
        with self._lock:
            self._socket = None

    def give_back(self, sock: object) -> None:
        """Drop the socket if it is ``sock``, whose connection may serve another call now."""
        with self._lock:
            if self._socket is sock:
                self._socket = None

    def cut(self) -> None:
        """Give the call up, from any thread. Never waits."""
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Not the TLS layer's own shutdown, which would remove the session under the reader.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class EventBatches:
    """Hands events to the loop in batches: one wake-up of the loop fetches all that have come.

    ``put`` belongs to the ``thread``, ``end`` to both, the rest to the loop. The lock is held for a few
    statements at a time and never during a wait, so the loop may take it.
    """

    thread: asyncio.Future[None]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.wire = Wire()
        self._loop = loop
        self._room = threading.Condition()
        self._events: deque[Event] = deque()
        self._failure: BackendFailure | None = None
        self._over = False
        self._waking = False
        self._news = asyncio.Event()

    def put(self, event: Event) -> None:
        """Hand over an event; waits while too many are unread. Raises WireCut when the call was given up."""
        with self._room:
            self._room.wait_for(lambda: len(self._events) < MAX_EVENTS or self.wire.is_cut)
            if self.wire.is_cut:
                raise WireCut
            self._events.append(event)
            self._wake()

    def end(self, failure: BackendFailure | None) -> None:
        with self._room:
            self._over, self._failure = True, failure
            self._wake()

    def _wake(self) -> None:
        if not self._waking:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._news.set)

    async def take(self) -> tuple[list[Event], bool]:
        """Wait for events; returns those that have come, and whether they were the last.

        Raises BackendFailure: the call's failure, once all events before it have been taken.
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

    async def wait_thread_ended(self) -> None:
        """Wait at most ``THREAD_END_WAIT_S`` until the thread has left."""
        await asyncio.wait([self.thread], timeout=THREAD_END_WAIT_S)
