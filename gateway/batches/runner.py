"""Runs the lines of batches on idle capacity."""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final, Protocol

import orjson
import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from accounting.batch_tables import BatchLine, BatchRow
from accounting.errors import LedgerUnavailable
from accounting.leases import LeaseEnds
from gateway.batches.batches import RUNNABLE
from gateway.batches.capacity import IdleCapacity
from gateway.batches.files import Files
from gateway.batches.outcome import LineOutcome, at_fault, output_line
from gateway.batches.reading import LineFault, body_of
from gateway.batches.stages import NO_CONTENT, finish, validate

POLL_S: Final = 1.0
"""Seconds between two reads of the batches; a cancellation by another gateway takes so long to be seen."""
REST: Final = 5
"""Pauses of ``POLL_S`` between two looks while there is no batch; a batch submitted here ends them."""
TICK_S: Final = 0.05  # seconds between two checks of idle capacity while there are lines
LEASE_S: Final = 20.0  # seconds after which a claim is void unless its gateway renews it
KEEP_S: Final = 4.0
SWEEP_S: Final = 60.0
STARTED_AT_ONCE: Final = 8  # most lines started between two checks, so that the engines' figures follow
MAX_TAKEOVERS: Final = 10  # most gateways that may end while they run a line; then the line fails
MAX_ENGINE_DEATHS: Final = 2  # if an engine dies on this try of a line, or a later one, the line fails
MAX_FAILURES: Final = 4
MAX_REFUSED: Final = 64
"""Lines refused in a row that pause a batch of several models, since the reason may be the key's."""
LONGEST_PAUSE_S: Final = 30.0
RATE_S: Final = 600.0  # time over which the rate of lines is averaged
RATE_LINES: Final = 10  # fewest lines from which a rate is known; and as many as run must have ended
UNREAD_PAUSE_S: Final = 5.0  # pause of a batch whose input the storage does not give
STORE_S: Final = 15.0
"""Longest time to retry storing a result, seconds; then the line is given back and runs again."""


class LineRunner(Protocol):
    """Runs one line as a request of the lowest class."""

    def ready(self) -> bool:
        """Whether this gateway takes requests."""

    def stopping(self) -> bool:
        """Whether this gateway takes no more work and ends its running work."""

    def fault(self, batch: BatchRow, body: bytes) -> LineFault | None:
        """The fault that the contract finds in a body, if there is one; blocks."""

    async def run(self, batch: BatchRow, line: BatchLine, body: bytes) -> LineOutcome:
        """Run the line. A cancelled run is not billed."""


@dataclass(eq=False, slots=True)
class _Running:
    """A line that runs on this gateway; one whose task is cancelled waits to run again.

    Its task is not cancelled while its result is being stored, for it would be generated again.
    """

    batch: BatchRow
    line: BatchLine
    task: asyncio.Task[None] = field(init=False)
    ended: bool = False

    @property
    def may_be_cancelled(self) -> bool:
        return not self.ended and not self.task.cancelling()


@dataclass(slots=True)
class _Refusals:
    """What the refused lines of a batch mean for its next lines; times are of the runner's clock.

    ``not_before``: when lines of the batch may start again; ``retry_not_before``: when refused ones may.
    Of the lines refused in this pass over the batch, ``place`` is the furthest, -1 without one, and
    ``in_a_row`` the number since one ended. ``first_pass`` is over once only refused lines are left.
    """

    not_before: float = float("-inf")
    retry_not_before: float = float("-inf")
    place: int = -1
    in_a_row: int = 0
    first_pass: bool = True

    def note(self, batch: BatchRow, place: int, now: float, pause_s: float) -> bool:
        """Note a refused line; true when a pause of the batch begins, in which no other line starts.

        In the first pass the lines of other models go on.
        """
        self.place, self.retry_not_before = max(self.place, place), now + pause_s
        self.in_a_row += 1
        one_model = orjson.loads(batch.body).get("model") is not None
        if not one_model and self.first_pass and self.in_a_row < MAX_REFUSED:
            return False
        begins = pause_s > 0 and self.not_before <= now
        self.not_before, self.in_a_row = now + pause_s, 0
        return begins


@dataclass(eq=False)
class BatchRunner:
    """Validates, runs and finishes batches; any number of gateways on one database share the work.

    Lines start only while there is idle capacity; the youngest ones are cancelled when callers wait.
    ``lines`` runs each one; without it no batch runs here.
    """

    files: Files
    capacity: IdleCapacity
    clock: Callable[[], float]
    _: KW_ONLY
    tick_s: float = TICK_S
    poll_s: float = POLL_S
    lines: LineRunner | None = None

    def __post_init__(self) -> None:
        # The unfinished batches in the database, lines that run here, and numbers of lines by outcome.
        self.batches: list[BatchRow] = []
        self.running: list[_Running] = []
        self._busy: set[str] = set()
        self._unfinished: list[BatchLine] = []
        self._reading = 0
        self.outcomes = dict.fromkeys(("completed", "failed", "returned"), 0)
        self._refusals: defaultdict[str, _Refusals] = defaultdict(_Refusals)  # by batch
        self._exhausted: set[str] = set()
        # Lines that ended lately, and in how many seconds; the clock and the ended lines at the last look.
        self._rate = (0.0, 0.0)
        self._looked = (self.clock(), 0)
        self._leases = LeaseEnds(LEASE_S, self.clock, self.files.now)
        self._log = structlog.get_logger("gateway.batches")

    def lines_per_s(self) -> float | None:
        """Lines that end here per second of the time in which they take the whole idle capacity.

        ``None``: not known, or no batch is in progress.
        """
        ended, seconds = self._rate
        return ended / seconds if ended >= max(RATE_LINES, len(self.running)) else None

    async def run(self) -> None:
        """Run until cancelled; lines that run then are given back to other gateways."""
        runner = self.lines
        if runner is None or not self.files.enabled:
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._every(KEEP_S, self._keep_claims, "claims are not kept"))
                tasks.create_task(self._every(SWEEP_S, self.files.sweep, "files are not swept"))
                polled_at, away = float("-inf"), False
                while True:
                    asked_at = self.files.now()
                    try:
                        if self.clock() - polled_at >= self.poll_s:
                            polled_at = self.clock()
                            await self._look(tasks, runner)
                            if away:
                                self._log.info("batches go on: the database is back")
                            away = False
                        await self._feed(tasks, runner)
                        self._leases.answered(asked_at)
                    except LedgerUnavailable as error:
                        self._leases.query_failed()
                        if not away:
                            self._log.warning("batches wait for the database", reason=str(error))
                        away = True
                    if self.running or any(one.status == "in_progress" for one in self.batches):
                        await asyncio.sleep(self.tick_s)
                    elif await self._rests(self.poll_s if self.batches else REST * self.poll_s):
                        polled_at = float("-inf")
        finally:
            try:
                await self.files.store.give_all_back()
            except LedgerUnavailable as error:
                self._log.warning("lines are not given back; their leases run out", reason=str(error))
            await self.files.store.close()

    async def _rests(self, pause_s: float) -> bool:
        """Wait until a batch is submitted here, at most ``pause_s``; returns whether one was."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self.files.submitted.wait()
                self.files.submitted.clear()
                return True
        return False

    async def _every(self, pause_s: float, work: Callable[[], Awaitable[None]], failed: str) -> None:
        while True:
            try:
                await work()
            except LedgerUnavailable as error:
                self._log.warning(failed, reason=str(error))
            await asyncio.sleep(pause_s)

    async def _keep_claims(self) -> None:
        if self.running or self._busy:
            await self.files.store.extend_leases(self.files.now() + LEASE_S, self._busy)

    def _measure(self) -> None:
        """Add the time since the last look to the rate, unless nothing ran or nothing more could start."""
        looked_at, before = self._looked
        self._looked = now, ended = self.clock(), self.outcomes["completed"] + self.outcomes["failed"]
        if not any(one.status == "in_progress" for one in self.batches):
            self._rate = (0.0, 0.0)  # the next lines may be different ones
        elif self.running and self._in_turn():
            kept = math.exp((looked_at - now) / RATE_S)
            self._rate = self._rate[0] * kept + ended - before, self._rate[1] * kept + now - looked_at

    async def _look(self, tasks: asyncio.TaskGroup, runner: LineRunner) -> None:
        self._measure()
        store, now = self.files.store, self.files.now()
        self.batches = await store.unfinished()
        self._exhausted.clear()
        for ended in self._refusals.keys() - {one.batch_id for one in self.batches}:
            del self._refusals[ended]
        in_progress = {one.batch_id for one in self.batches if one.status == "in_progress"}
        stops = runner.stopping()
        for one in self.running:
            if (stops or one.batch.batch_id not in in_progress) and one.may_be_cancelled:
                one.task.cancel()
        for batch in self.batches:
            if batch.batch_id in self._busy:
                continue
            if batch.status in RUNNABLE and batch.expires_at <= now:
                await store.change(batch.batch_id, (batch.status,), status="finalizing", ending="expired")
            elif batch.status == "validating":
                work = partial(validate, self.files, body_fault=partial(runner.fault, batch))
                await self._begin(tasks, batch, work)
            elif batch.status != "in_progress" and await store.end_lines(
                batch.batch_id, self._leases.over_before()
            ):
                await self._begin(tasks, batch, partial(finish, self.files))

    async def _begin(
        self,
        tasks: asyncio.TaskGroup,
        batch: BatchRow,
        work: Callable[[BatchRow], Awaitable[None]],
    ) -> None:
        late, until = self._leases.over_before(), self.files.now() + LEASE_S
        if not await self.files.store.claim(batch.batch_id, batch.status, late, until):
            return
        self._busy.add(batch.batch_id)

        async def done() -> None:
            try:
                await work(batch)
                await self.files.store.release(batch.batch_id)
            except (LedgerUnavailable, OSError) as error:
                # The lease runs out; then this gateway or another one does the work again.
                self._log.warning("batch waits", batch=batch.batch_id, reason=str(error))
            finally:
                self._busy.discard(batch.batch_id)

        tasks.create_task(done(), name=batch.batch_id)

    async def _feed(self, tasks: asyncio.TaskGroup, runner: LineRunner) -> None:
        while self._unfinished:
            await self.files.store.give_back(self._unfinished[0])
            del self._unfinished[0]  # others may have been added meanwhile
            self.outcomes["returned"] += 1
        if waiting := self.capacity.waiting():
            for youngest in [one.task for one in self.running if one.may_be_cancelled][-waiting:]:
                youngest.cancel()
            return
        room = min(self.capacity.room() - self._reading, STARTED_AT_ONCE)
        room = min(room, self.files.section.max_running - len(self.running))
        if room <= 0 or not runner.ready() or any(one.line.failures for one in self.running):
            return  # a line that has failed before runs alone, so that no other line is blamed
        in_turn = self._in_turn()
        for left, batch in zip(range(len(in_turn), 0, -1), in_turn, strict=True):
            if room <= 0:
                return
            claimed = await self._claimed(batch, max(1, room // left))
            if not claimed:
                self._exhausted.add(batch.batch_id)
                await self._end_if_over(batch)
            at_work = {(one.line.batch_id, one.line.place) for one in self.running}
            for line in claimed:
                # A line that another gateway had taken and given back may still run here: its result counts.
                if (line.batch_id, line.place) not in at_work:
                    self._start(tasks, batch, line, runner)
            room -= len(claimed)
            if any(line.failures for line in claimed):
                return

    async def _claimed(self, batch: BatchRow, most: int) -> list[BatchLine]:
        late, until = self._leases.over_before(), self.files.now() + LEASE_S
        claim = partial(self.files.store.claim_lines, batch.batch_id, late, until)
        refused = self._refusals[batch.batch_id]
        claimed = await claim(most, refused.place)  # a line that is always refused holds no other line up
        if not claimed and refused.place >= 0 and refused.retry_not_before <= self.clock():
            refused.first_pass, refused.place = False, -1
            claimed = await claim(most)
        return claimed or ([] if self.running else await claim(1, failed_before=True))

    def _in_turn(self) -> list[BatchRow]:
        """The batches with lines to start: those of tenants with the fewest lines running here first, so that
        tenants take turns.
        """
        at_work, now = Counter(one.batch.tenant for one in self.running), self.clock()
        waiting = [
            one
            for one in self.batches
            if one.status == "in_progress"
            and one.batch_id not in self._exhausted
            and self._refusals[one.batch_id].not_before <= now
        ]
        return sorted(waiting, key=lambda one: (at_work[one.tenant], one.created_at))

    async def _end_if_over(self, batch: BatchRow) -> None:
        counts = await self.files.store.counts(batch.batch_id)
        if counts.of("done", "failed") >= batch.total:
            await self.files.store.change(
                batch.batch_id, ("in_progress",), status="finalizing", ending="completed"
            )

    def _start(self, tasks: asyncio.TaskGroup, batch: BatchRow, line: BatchLine, runner: LineRunner) -> None:
        name = f"{batch.batch_id}:{line.number}"
        own = _Running(batch, line)
        own.task = tasks.create_task(self._line(own, runner), name=name)
        self.running.append(own)
        own.task.add_done_callback(lambda _: self.running.remove(own))

    async def _line(self, own: _Running, runner: LineRunner) -> None:
        batch, line = own.batch, own.line
        try:
            if line.takeovers >= MAX_TAKEOVERS:
                outcome = at_fault(f"{line.takeovers} gateways ended while they ran the line")
            else:
                self._reading += 1
                try:
                    body = await self._body(batch, line)
                finally:
                    self._reading -= 1
                outcome = await runner.run(batch, line, body)
        except asyncio.CancelledError:
            self._unfinished.append(line)
            raise
        except (FileNotFoundError, ValueError, RecursionError) as error:  # the file is gone, or was damaged
            self._log.error("line not read", batch=batch.batch_id, line=line.number, reason=str(error))
            gone = isinstance(error, FileNotFoundError)
            outcome = at_fault(NO_CONTENT if gone else "the line cannot be read from the input file")
        except (OSError, LedgerUnavailable) as error:  # an outage, or a key that another gateway has
            self._log.warning("line waits", batch=batch.batch_id, line=line.number, reason=str(error))
            outcome = LineOutcome(503, b"", reason="its input cannot be read now", retry_s=UNREAD_PAUSE_S)
        own.ended = True
        tries = line.failures + 1
        failed = (outcome.engine_died and tries < MAX_ENGINE_DEATHS) or (
            outcome.failed_here and tries < MAX_FAILURES
        )
        if failed or outcome.retry_s is not None:
            pause_s = min(LONGEST_PAUSE_S, outcome.retry_s or 0.0)
            if self._refusals[batch.batch_id].note(batch, line.place, self.clock(), pause_s):
                self._log.info(
                    "batch pauses",
                    batch=batch.batch_id,
                    line=line.number,
                    reason=outcome.reason,
                    pause_s=pause_s,
                )
            await self._stored(line, lambda: self.files.store.give_back(line, int(failed)))
            self.outcomes["returned"] += 1
        else:
            self._refusals[batch.batch_id].in_a_row = 0
            await self._stored(line, lambda: self._finish_line(line, outcome))

    async def _body(self, batch: BatchRow, line: BatchLine) -> bytes:
        def read() -> bytes:
            return body_of(b"".join(self.files.storage.chunks(batch.input_file_id, line.start, line.size)))

        try:
            return await asyncio.to_thread(read)
        except ValueError:
            await self.files.check_key(batch.tenant, batch.input_file_id)
            raise

    async def _finish_line(self, line: BatchLine, outcome: LineOutcome) -> None:
        status = "done" if outcome.status == 200 else "failed"
        output = output_line(line, outcome)
        if await self.files.store.finish(line, status, output, outcome.usage, outcome.response):
            self.outcomes["completed" if status == "done" else "failed"] += 1

    async def _stored(self, line: BatchLine, write: Callable[[], Awaitable[object]]) -> None:
        """Store a line's result, with retries: a result that is not stored must be generated again."""
        stored = False
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(LedgerUnavailable),
                wait=wait_exponential_jitter(multiplier=0.05, max=2.0),
                stop=stop_after_delay(STORE_S),
                reraise=True,
            ):
                with attempt:
                    await write()
            stored = True
        except asyncio.CancelledError:
            with suppress(LedgerUnavailable):
                await write()  # the gateway ends; the first write may have been interrupted
                stored = True
            raise
        except LedgerUnavailable as error:
            self._log.warning("a line's result is lost; it runs again", reason=str(error))
        finally:
            if not stored:
                self._unfinished.append(line)
