"""Copies answered requests, sends the copies to another backend when it is idle, and stores the comparison.

The caller's answer is complete before that: :meth:`Shadow.mirror` takes a few microseconds, never waits and
raises nothing. Background loops do the rest; they start no copy while the event loop is overloaded.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import structlog

from accounting.errors import AccountingError
from accounting.shadow_pairs import ShadowPairStore
from accounting.shadow_values import ShadowPair
from gateway.contracts.answer import Answer
from gateway.generation.dispatcher import GenerationOutcome
from gateway.generation.job import Job
from gateway.keys.ceilings import NANOUSD
from gateway.shadow.asking import Asker, NotAsked
from gateway.shadow.comparing import Comparer
from gateway.shadow.judge import Judge
from gateway.shadow.sampling import Copy, ShadowOutcome, ShadowQueue, chosen

POLL_S = 0.1  # seconds between checks of a busy backend
LATE_S = 0.01  # the event loop is overloaded if a sleep ends this many seconds too late
# Pairs are written in batches: the interval in seconds, and the most pairs of a batch.
WRITE_S = 1.0
WRITE_PAIRS = 200
MAX_UNWRITTEN = 1_000  # the most pairs that wait for an unavailable database
LAST_WRITE_S = 2.0  # time limit of the last write when the gateway stops
DELETE_S = 3_600.0  # the interval at which old pairs are deleted, even when no request is shadowed any more


@dataclass(eq=False, kw_only=True)
class Shadow:
    """The shadow of one gateway process.

    Args:
        judge: judges pairs; ``None``: pairs are not judged.
        concurrency: copies that are processed at once.
        deadline_s: longest time that a copy waits for idle capacity.
    """

    queue: ShadowQueue
    asker: Asker
    comparer: Comparer
    pairs: ShadowPairStore
    judge: Judge | None
    concurrency: int
    deadline_s: float
    clock: Callable[[], float]
    unix_time: Callable[[], float]

    def __post_init__(self) -> None:
        self._log = structlog.get_logger("shadow")
        # Sampled requests by outcome; pairs that are stored, and that the database did not accept in time.
        self.outcomes = Counter({one.value: 0 for one in ShadowOutcome})
        self.pairs_made = {"written": 0, "lost": 0}
        self.active = 0  # copies in progress
        self._not_empty = asyncio.Event()
        self._unwritten: deque[ShadowPair] = deque()

    def mirror(self, job: Job, outcome: GenerationOutcome, answer: Answer) -> None:
        """Copy an answered request when its route has a shadow and the sample includes it.

        Only answers that a model of another backend generated are compared. Text completions have no messages
        that could be redacted, and images cannot be redacted.
        """
        rule = job.target.route.config.shadow
        if rule is None or not chosen(job.request.generation_id, rule.sample):
            return
        whole = answer.fallback is None and answer.usage.input_tokens > 0
        plain = job.request.raw_prompt is None and not job.images
        if not whole or answer.backend_name == rule.backend or not plain:
            return
        copy = Copy(
            job.request, job.target, outcome.plan, answer, outcome.adapter, rule.backend, self.clock()
        )
        if self.queue.offer(copy):
            self._not_empty.set()
        else:
            self.outcomes[ShadowOutcome.QUEUE_FULL] += 1

    def spend_usd(self) -> float:
        """The cost of the last minute, and reserved."""
        legs = self.asker.limits.figures().values()
        return sum(one.spent_nanousd + one.reserved_nanousd for one in legs) / NANOUSD

    async def run(self) -> None:
        """Process copies until cancelled; waiting copies are dropped then, compared pairs are written."""
        try:
            async with asyncio.TaskGroup() as loops:
                for number in range(self.concurrency):
                    loops.create_task(self._work(), name=f"shadow-{number}")
                loops.create_task(self._write_loop(), name="shadow-pairs")
        finally:
            try:
                async with asyncio.timeout(LAST_WRITE_S):
                    await self._write()
                    await self.pairs.close()
            except TimeoutError:
                self._log.warning("shadow pairs not written at the end", count=len(self._unwritten))

    async def _work(self) -> None:
        while True:
            copy = self.queue.take()
            if copy is None:
                self._not_empty.clear()
                await self._not_empty.wait()
                continue
            self.active += 1
            try:
                self.outcomes[await self._one(copy)] += 1
            except Exception as error:
                # One copy is lost; the loop continues. The message may hold text, so only the type is logged.
                self.outcomes[ShadowOutcome.DEFECT] += 1
                self._log.error("shadow failed", error_type=type(error).__name__)
            finally:
                self.active -= 1

    async def _one(self, copy: Copy) -> ShadowOutcome:
        while await self._late() or not self.asker.idle(copy.backend):
            if self.clock() - copy.made_at >= self.deadline_s:
                return ShadowOutcome.TOO_OLD
            await asyncio.sleep(POLL_S)
        try:
            asked = await self.asker.ask(copy)
        except NotAsked as refused:
            return refused.outcome
        pair, texts = await asyncio.to_thread(self.comparer.compare, copy, asked)
        # A judge compares only texts, not tool calls.
        called = pair.primary.tool_calls or pair.shadow.tool_calls
        if self.judge is not None and asked.failure is None and not called:
            pair = replace(pair, judged=await self.judge.judge(copy, texts))
        if len(self._unwritten) < MAX_UNWRITTEN:
            self._unwritten.append(pair)
        else:
            self.pairs_made["lost"] += 1
        return ShadowOutcome.COMPARED if asked.failure is None else ShadowOutcome.FAILED

    async def _late(self) -> bool:
        began = self.clock()
        await asyncio.sleep(0.0)
        return self.clock() - began > LATE_S

    async def _write_loop(self) -> None:
        delete_at = self.clock() + DELETE_S
        while True:
            await asyncio.sleep(WRITE_S)
            await self._write()
            if self.clock() >= delete_at:
                delete_at += DELETE_S
                await self._put(())

    async def _write(self) -> None:
        """Write the waiting pairs; pairs that the database does not accept are tried again later."""
        while self._unwritten:
            batch = list(islice(self._unwritten, WRITE_PAIRS))
            if not await self._put(batch):
                return
            self.pairs_made["written"] += len(batch)
            for _ in batch:
                self._unwritten.popleft()

    async def _put(self, batch: Sequence[ShadowPair]) -> bool:
        try:
            await self.pairs.write(batch, now=self.unix_time())
        except AccountingError as error:
            self._log.warning("shadow pairs not written", reason=str(error), count=len(self._unwritten))
            return False
        return True
