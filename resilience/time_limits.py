"""Time limits of many tasks on one timer of the event loop."""

import asyncio
import heapq
import math
from collections.abc import Callable
from typing import Self

from msgspec import Struct

# A limit ends late by at most this share of its length, so that limits with nearly the same end end together.
LATENESS = 1 / 1024
# A timer that is later than this shows a busy event loop: it may not have read yet what came in time.
LATE_S = 0.1


class TimeLimit(Struct, eq=False):
    """A block's time limit: cancels the task that entered it, as ``asyncio.timeout`` does, at lower cost.

    It ends after ``after_s`` seconds, plus those that ``moved`` returns at that time. Raises TimeoutError in
    place of that cancellation.
    """

    limits: "TimeLimits"
    after_s: float
    moved: Callable[[], float] | None = None
    expired: bool = False
    _moved_s: float = 0.0
    _ending: "set[TimeLimit] | None" = None
    _task: asyncio.Task[object] | None = None
    _cancelling: int = 0

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)  # without `loop` it takes twice as long
        if task is None:
            raise RuntimeError("a time limit needs a task")
        self._task, self._cancelling = task, task.cancelling()
        self._ending = self.limits.add(self, self.after_s, loop)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.expired:
            if self._ending is not None:
                self._ending.discard(self)
            return
        others = self._task is None or self._task.uncancel() > self._cancelling
        if kind is asyncio.CancelledError and not others:
            raise TimeoutError from error

    def expire(self) -> None:
        """Cancel the task, since the time is up, unless the end has moved."""
        before_s, self._moved_s = self._moved_s, 0.0 if self.moved is None else self.moved()
        self._ending = None
        if self._moved_s > before_s:
            self._ending = self.limits.add(self, self._moved_s - before_s, asyncio.get_running_loop())
        elif self._task is not None:
            self.expired = True
            self._task.cancel()


class OnTime(Struct, eq=False):
    """``moved`` of a limit on an answer from elsewhere: counts only time in which the event loop is on time.

    Otherwise a burst of requests on a machine that is short of CPU would find every server unreachable. The
    limit's ``after_s`` is ``step_s``, the time until the loop is looked at first.

    Args:
        left_s: what is left of the time for the answer.
        most_s: the most seconds for it in all; it begins now.
        waits_here: whether what the limit is for still waits in this process, not for the answer.
    """

    left_s: float
    most_s: float
    waits_here: Callable[[], bool] | None = None
    step_s: float = 0.0
    _due: float = 0.0
    _last: float = 0.0
    _moved_s: float = 0.0

    def __post_init__(self) -> None:
        now = asyncio.get_running_loop().time()
        self.step_s = min(LATE_S, self.left_s)
        self._due, self._last = now + self.step_s, now + self.most_s

    def __call__(self) -> float:
        now = asyncio.get_running_loop().time()
        if now - self._due < LATE_S and (self.waits_here is None or not self.waits_here()):
            self.left_s -= self.step_s
        if self.left_s > 0 and now < self._last:
            self.step_s = min(LATE_S, self.left_s)
            self._due = now + self.step_s
            self._moved_s += self.step_s
        return self._moved_s


class TimeLimits:
    """The time limits of one event loop; ``ending`` has them by the loop's time of their end."""

    def __init__(self) -> None:
        self.ending: dict[float, set[TimeLimit]] = {}
        self._ends: list[float] = []  # a heap
        # One timer, for the next end: one per limit would outlive its request, for the collector to visit.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def add(self, limit: TimeLimit, after_s: float, loop: asyncio.AbstractEventLoop) -> set[TimeLimit]:
        """Add a limit; returns those that end with it, from which it is removed."""
        at = loop.time() + after_s
        if after_s > 0:
            tick = math.ldexp(1.0, math.frexp(after_s * LATENESS)[1] - 1)
            at = -(-at // tick) * tick  # rounded up
        ending = self.ending.get(at)
        if ending is None:
            ending = self.ending[at] = set()
            heapq.heappush(self._ends, at)
            if at < self._timer_at:
                self._set_timer(loop)
        ending.add(limit)
        return ending

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._ends[0]
        self._timer = loop.call_at(self._timer_at, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        now = max(self._timer_at, loop.time())
        self._timer, self._timer_at = None, math.inf
        due: list[TimeLimit] = []
        while self._ends and self._ends[0] <= now:
            due += self.ending.pop(heapq.heappop(self._ends))
        if self._ends:
            self._set_timer(loop)
        for limit in due:
            limit.expire()
