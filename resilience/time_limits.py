"""Time limits of many tasks on one timer of the event loop."""

import asyncio
import heapq
import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

# A limit ends late by at most this share of its length: those that end at about one time end together.
LATENESS = 1 / 1024


class TimeLimit:
    """A block's time limit: cancels the task that entered it, as ``asyncio.timeout`` does, for less.

    It ends after ``after_s`` seconds, or later by as many as ``moved`` returns then. Raises TimeoutError in
    place of that cancellation.
    """

    __slots__ = ("_cancelling", "_key", "_limits", "_moved", "_moved_s", "_task", "after_s", "expired")

    def __init__(
        self, limits: "TimeLimits", after_s: float, moved: Callable[[], float] | None = None
    ) -> None:
        self._limits = limits
        self.after_s = after_s
        self._moved = moved
        self._moved_s = 0.0
        self.expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a time limit needs a task")
        self._task, self._cancelling = task, task.cancelling()
        self._key = self._limits.add(self, self.after_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.expired:
            ending = self._limits.ending.get(self._key)
            if ending is not None:
                ending.discard(self)
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def due(self) -> None:
        """The time is up: cancel the task, unless the end has moved."""
        before_s, self._moved_s = self._moved_s, 0.0 if self._moved is None else self._moved()
        if self._moved_s > before_s:
            self._key = self._limits.add(self, self._moved_s - before_s)
        else:
            self.expired = True
            self._task.cancel()


class TimeLimits:
    """The time limits of one event loop, ``ending`` by its time."""

    def __init__(self) -> None:
        self.ending: dict[float, set[TimeLimit]] = {}
        self._ends: list[float] = []  # a heap
        # One timer, for the next end: one for each would outlive its requests, for the collector to visit.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def add(self, limit: TimeLimit, after_s: float) -> float:
        """Set the limit; the key to remove it by."""
        loop = asyncio.get_running_loop()
        at = loop.time() + after_s
        if after_s > 0:
            tick = math.ldexp(1.0, math.frexp(after_s * LATENESS)[1] - 1)
            at = math.ceil(at / tick) * tick
        ending = self.ending.get(at)
        if ending is None:
            ending = self.ending[at] = set()
            heapq.heappush(self._ends, at)
            if at < self._timer_at:
                self._set_timer(loop)
        ending.add(limit)
        return at

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._ends[0]
        self._timer = loop.call_at(self._timer_at, self._due, loop)

    def _due(self, loop: asyncio.AbstractEventLoop) -> None:
        now = max(self._timer_at, loop.time())
        self._timer, self._timer_at = None, math.inf
        due: list[TimeLimit] = []
        while self._ends and self._ends[0] <= now:
            due += self.ending.pop(heapq.heappop(self._ends))
        if self._ends:
            self._set_timer(loop)
        for limit in due:
            limit.due()
