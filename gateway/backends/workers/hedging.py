"""Hedged requests: a request whose first token is late is sent to a second worker too.

The worker that sends a token first answers the request; the other call is cancelled, which closes its
connection and frees its sequence. :class:`HedgePolicy` decides when and how often; :func:`race` runs both.

Source: Dean and Barroso, "The Tail at Scale" (CACM 2013): waiting for the 95th percentile or later keeps the
extra load at a few percent and takes most of the tail.
"""

import asyncio
import contextlib
import math
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from gateway.backends.port import Completion, DeltaSink
from gateway.config.backends import HedgeSection
from gateway.contracts.events import Delta

# Window of times to first token, seconds; each counts in its window and the next one: long enough for a p99,
# short enough to follow the load.
WINDOW_S = 60.0
# Bounds of the histogram, seconds, and the ratio of a bucket's edges, which is the error of a quantile.
SHORTEST_S, LONGEST_S, RATIO = 0.001, 600.0, 1.1
_BUCKETS = math.ceil(math.log(LONGEST_S / SHORTEST_S) / math.log(RATIO)) + 1
MOST_SAVED = 10.0  # most extra requests that can be saved up while traffic is low


class HedgePolicy:
    """Measures the times to first tokens; grants extra requests. ``now`` is any monotonic clock, seconds.

    A request is late after the ``quantile`` of the pool's times to first token, and not before ``min_ms``. At
    most ``max_share`` of all requests are sent twice.

    Counters: ``sent``, requests sent to a second worker; ``won``, those that the second worker answered;
    ``refused``, late requests that were not sent twice because the share was used up.
    """

    def __init__(self, rules: HedgeSection) -> None:
        self._rules = rules
        # A quantile needs enough samples for one to be above it.
        self._needed = math.ceil(1.0 / (1.0 - rules.quantile))
        self._recent = [0] * _BUCKETS
        self._old = [0] * _BUCKETS
        self._since = -math.inf
        self._saved = 0.0
        self.sent = self.won = self.refused = 0

    def record_request(self) -> None:
        """Record a new request, which earns ``max_share`` of an extra one."""
        self._saved = min(self._saved + self._rules.max_share, MOST_SAVED)

    def record_first_token(self, first_token_s: float, now: float) -> None:
        """Record a time to first token; a cancelled call counts with its time until the cancellation."""
        self._rotate_window(now)
        position = math.log(max(first_token_s, SHORTEST_S) / SHORTEST_S) / math.log(RATIO)
        self._recent[min(_BUCKETS - 1, math.ceil(position))] += 1

    def late_after_s(self, now: float) -> float | None:
        """How long to wait for a first token; ``None`` while there are too few samples."""
        self._rotate_window(now)
        seen = list(accumulate(map(add, self._recent, self._old)))
        if seen[-1] < self._needed:
            return None
        bucket = bisect_left(seen, self._rules.quantile * seen[-1])
        return max(self._rules.min_ms / 1000, SHORTEST_S * RATIO**bucket)

    def grant(self) -> bool:
        """Whether one more extra request may be sent; it is then counted as sent."""
        if self._saved < 1.0:
            self.refused += 1
            return False
        self._saved -= 1.0
        self.sent += 1
        return True

    def _rotate_window(self, now: float) -> None:
        age = now - self._since
        if age < WINDOW_S:
            return
        self._old = self._recent if age < 2 * WINDOW_S else [0] * _BUCKETS
        self._recent = [0] * _BUCKETS
        self._since = now


Run = Callable[[DeltaSink], Awaitable[Completion]]


async def race(
    first: Run,
    second: Callable[[], Run | None],
    out: DeltaSink,
    *,
    late_after_s: float | None,
    policy: HedgePolicy,
    clock: Callable[[], float],
) -> Completion:
    """The answer of ``first``, or of the second run if that sends a token before.

    ``second`` is called if the first run's first delta is late; it may return ``None``. Raises the failure of
    the run whose deltas went out, else that of the first run.
    """
    runs = _Race(out, policy, clock)
    async with asyncio.TaskGroup() as group:
        runs.start(group, first)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(late_after_s):
                await runs.settled.wait()
        if not runs.settled.is_set() and (other := second()) is not None:
            runs.start(group, other)
    return runs.result()


class _LostRace(Exception):
    """The other run has sent a token first."""


@dataclass(slots=True, eq=False)
class _Runner:
    """One of the two runs."""

    started_at: float
    task: asyncio.Task[None] | None = None
    ended: Completion | Exception | None = None


class _Race:
    """Decides which run gets the sink. Settled once a run has it, or the first run has ended."""

    def __init__(self, out: DeltaSink, policy: HedgePolicy, clock: Callable[[], float]) -> None:
        self.settled = asyncio.Event()
        self._out = out
        self._policy = policy
        self._clock = clock
        self._runners: list[_Runner] = []
        self._winner: _Runner | None = None

    def start(self, group: asyncio.TaskGroup, run: Run) -> None:
        runner = _Runner(self._clock())
        self._runners.append(runner)
        runner.task = group.create_task(self._run(runner, run))

    def _claim(self, runner: _Runner) -> None:
        """Give ``runner`` the sink at its first output. Raises _LostRace when the other run has it."""
        if self._winner is runner:
            return
        if self._winner is not None:
            raise _LostRace
        self._winner = runner
        now = self._clock()
        for one in self._runners:
            if not isinstance(one.ended, Exception):
                self._policy.record_first_token(now - one.started_at, now)
            if one is not runner and one.task is not None:
                one.task.cancel()
        if runner is not self._runners[0]:
            self._policy.won += 1
        self.settled.set()

    async def _run(self, runner: _Runner, run: Run) -> None:
        async def push(delta: Delta) -> None:
            self._claim(runner)
            await self._out(delta)

        try:
            completion = await run(push)
            self._claim(runner)  # an answer may be empty
            runner.ended = completion
        except Exception as error:
            runner.ended = error
        finally:
            self.settled.set()

    def result(self) -> Completion:
        ended = (self._winner or self._runners[0]).ended
        if isinstance(ended, Completion):
            return ended
        assert ended is not None, "a runner that was not cancelled ends with an answer or an error"
        raise ended
