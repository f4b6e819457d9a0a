"""Takes a copy of answered requests, asks another backend when there is time, and keeps how both compare.

The caller's way ends before this begins: :meth:`Shadow.mirror` takes a few microseconds, waits for nothing
and raises nothing. All else is done by loops of their own, that begin nothing while the event loop is late.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from accounting.errors import AccountingError
from accounting.shadow_values import ShadowPair
from gateway.contracts.values import Answer
from gateway.generation.dispatcher import GenerationOutcome
from gateway.generation.job import Job
from gateway.shadow.asking import Asks, NotAsked, Order, ShadowAnswer
from gateway.shadow.comparing import Comparer, JudgedPair
from gateway.shadow.sampling import Copy, ShadowOutcome, ShadowQueue, chosen

# How often a backend without room is looked at again.
POLL_S = 0.1
# A sleep that ends so much later than asked says that callers need the event loop.
LATE_S = 0.01
# Pairs are written together, so often, so many at once.
WRITE_S = 1.0
WRITE_PAIRS = 200
# Pairs that wait for a database that is away.
MAX_UNWRITTEN = 1_000
# For the last ones when the gateway stops.
LAST_WRITE_S = 2.0
# What is too old is forgotten so often, even when nothing is shadowed any more.
FORGET_S = 3_600.0


class KeepsPairs(Protocol):
    """Where pairs go."""

    async def write(self, pairs: Sequence[ShadowPair], *, now: float) -> None:
        """Make pairs durable. Raises AccountingError; then nothing is known to be."""

    async def close(self) -> None:
        """Let the database go."""


class Judges(Protocol):
    """Who says which answer is better."""

    async def judge(self, copy: Copy, told: JudgedPair) -> str | None:
        """The verdict, or ``None``; raises nothing."""


@dataclass(frozen=True, slots=True)
class ShadowFigures:
    """How the shadow stands.

    Args:
        fates: requests by what became of them, since the start.
        written: pairs kept.
        lost: pairs that the database did not take in time.
    """

    fates: Mapping[ShadowOutcome, int]
    waiting: int
    waiting_bytes: int
    active: int
    written: int
    lost: int


class Shadow:
    """The shadow of one gateway process.

    Args:
        line: copies that wait.
        asks: who asks the other backend.
        comparer: measures both answers.
        pairs: where they are kept.
        judge: an opinion on top; ``None``: nobody's.
        concurrency: copies that are worked on at once.
        deadline_s: longest that a copy waits for room.
        clock: seconds, monotonic.
        unix_time: seconds since 1970.
        sleep: waits that many seconds.
    """

    def __init__(
        self,
        *,
        line: ShadowQueue,
        asks: Asks,
        comparer: Comparer,
        pairs: KeepsPairs,
        judge: Judges | None,
        concurrency: int,
        deadline_s: float,
        clock: Callable[[], float],
        unix_time: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._line = line
        self._asks = asks
        self._comparer = comparer
        self._pairs = pairs
        self._judge = judge
        self._concurrency = concurrency
        self._deadline_s = deadline_s
        self._clock = clock
        self._unix_time = unix_time
        self._sleep = sleep
        self._log = structlog.get_logger("shadow")
        self._fates: Counter[ShadowOutcome] = Counter()
        self._some = asyncio.Event()
        self._unwritten: deque[ShadowPair] = deque()
        self._active = self._written = self._lost = 0

    def mirror(self, job: Job, outcome: GenerationOutcome, answer: Answer) -> None:
        """Take a copy of an answered request when its route and the sample say so.

        Only answers that a model gave, and not this very backend, are worth comparing; text completions
        have no messages that could be redacted.
        """
        rule = job.target.route.shadow
        if rule is None or not chosen(job.request.generation_id, rule.sample):
            return
        whole = answer.fallback is None and answer.usage.input_tokens > 0
        if not whole or answer.backend_name == rule.backend or job.request.raw_prompt is not None:
            return
        copy = Copy(
            job.request, job.target, outcome.plan, answer, outcome.adapter, rule.backend, self._clock()
        )
        if self._line.offer(copy):
            self._some.set()
        else:
            self._fates[ShadowOutcome.QUEUE_FULL] += 1

    def figures(self) -> ShadowFigures:
        """For the metrics."""
        return ShadowFigures(
            {fate: self._fates[fate] for fate in ShadowOutcome},
            len(self._line),
            self._line.size_bytes,
            self._active,
            self._written,
            self._lost,
        )

    async def run(self) -> None:
        """Work on copies until cancelled; what waits then is let go, what was compared is written."""
        try:
            async with asyncio.TaskGroup() as loops:
                for number in range(self._concurrency):
                    loops.create_task(self._work(), name=f"shadow-{number}")
                loops.create_task(self._write_on(), name="shadow-pairs")
        finally:
            try:
                async with asyncio.timeout(LAST_WRITE_S):
                    await self._write()
                    await self._pairs.close()
            except TimeoutError:
                self._log.warning("shadow pairs not written at the end", count=len(self._unwritten))

    async def _work(self) -> None:
        while True:
            copy = self._line.take()
            if copy is None:
                self._some.clear()
                await self._some.wait()
                continue
            self._active += 1
            try:
                self._fates[await self._one(copy)] += 1
            except Exception as error:
                # One copy is lost, not the shadow; its text may stand in the error's.
                self._fates[ShadowOutcome.DEFECT] += 1
                self._log.error("shadow failed", error_type=type(error).__name__)
            finally:
                self._active -= 1

    async def _one(self, copy: Copy) -> ShadowOutcome:
        while await self._late() or not self._asks.idle(copy.backend):
            if self._clock() - copy.made_at >= self._deadline_s:
                return ShadowOutcome.TOO_OLD
            await self._sleep(POLL_S)
        try:
            asked = await self._asks.ask(
                Order(copy.request, copy.target, copy.plan, copy.adapter, copy.backend)
            )
        except NotAsked as refused:
            return refused.fate
        return await self._keep(copy, asked)

    async def _keep(self, copy: Copy, asked: ShadowAnswer) -> ShadowOutcome:
        pair, told = await asyncio.to_thread(self._comparer.compare, copy, asked)
        if self._judge is not None and asked.failure is None:
            pair = replace(pair, judged=await self._judge.judge(copy, told))
        if len(self._unwritten) < MAX_UNWRITTEN:
            self._unwritten.append(pair)
        else:
            self._lost += 1
        return ShadowOutcome.COMPARED if asked.failure is None else ShadowOutcome.FAILED

    async def _late(self) -> bool:
        """Whether the event loop has more to do than it can."""
        began = self._clock()
        await self._sleep(0.0)
        return self._clock() - began > LATE_S

    async def _write_on(self) -> None:
        forget_at = self._clock() + FORGET_S
        while True:
            await self._sleep(WRITE_S)
            await self._write()
            if self._clock() >= forget_at:
                forget_at += FORGET_S
                await self._put(())

    async def _write(self) -> None:
        """Write what waits; what the database does not take now is tried again."""
        while self._unwritten:
            batch = [self._unwritten[i] for i in range(min(WRITE_PAIRS, len(self._unwritten)))]
            if not await self._put(batch):
                return
            self._written += len(batch)
            for _ in batch:
                self._unwritten.popleft()

    async def _put(self, batch: Sequence[ShadowPair]) -> bool:
        try:
            await self._pairs.write(batch, now=self._unix_time())
        except AccountingError as error:
            self._log.warning("shadow pairs not written", reason=str(error), count=len(self._unwritten))
            return False
        return True
