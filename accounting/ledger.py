"""The usage ledger: rows are taken without waiting, written in batches, and never billed twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from accounting.events import LedgerEvent, LossReason, RowsLost, RowsWritten, WriteFailed
from accounting.store import GenerationStore, UnwritableRows
from accounting.values import UsageRow

# Waits between tries while the database is away: short enough to catch up at once after a lock, long
# enough not to burden a server that is down.
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
# How long the first row waits for others to share its transaction. A transaction costs 0.8 ms of CPU, a row
# of a large one 0.02 ms: written at once, a row would cost a request more than all other stages together.
GATHER_S = 0.1
# Generation ids that one loss names.
MAX_NAMED = 20
# Longest that a start waits for a database which does not answer.
OPEN_S = 5.0
# Longest that one call of the database may take before it counts as failed.
DATABASE_CALL_S = 30.0
# What closing may take beyond its flush: a thread in a database call cannot be interrupted.
DISPOSE_S = 2.0


class Ledger:
    """An outbox in memory in front of a table.

    ``append`` never waits, so the database's state costs no request anything. While the database is
    away, rows wait (at most ``outbox_rows``) and are tried again for as long as it takes. What is lost
    after all (outbox full, closed before written, a row that no database takes) is counted and told as
    :class:`~accounting.events.RowsLost`, never silent. Not for several threads.

    Args:
        url: ``sqlite+aiosqlite:///file`` or ``postgresql+asyncpg://…``.
        emit: takes each event; must not block.
        clock: seconds, monotonic.
        unix_time: seconds, for events.
        outbox_rows: most rows that wait.
        batch_rows: most rows of one transaction.
        gather_s: how long a row may wait for others of its transaction, seconds.
        first_retry_s: rest after the first failure, seconds; doubles up to ``LONGEST_RETRY_S``.
        store: makes the store of a url.
    """

    def __init__(
        self,
        url: str,
        *,
        emit: Callable[[LedgerEvent], None],
        clock: Callable[[], float],
        unix_time: Callable[[], float],
        outbox_rows: int = 10_000,
        batch_rows: int = 500,
        first_retry_s: float = FIRST_RETRY_S,
        gather_s: float = GATHER_S,
        store: Callable[[str], GenerationStore] = GenerationStore,
    ) -> None:
        if outbox_rows < 1 or batch_rows < 1:
            raise ValueError(f"outbox_rows is {outbox_rows}, batch_rows is {batch_rows}; allowed: 1 or more")
        self._store = store(url)
        self._first_retry_s = first_retry_s
        self._gather_s = gather_s
        self._emit = emit
        self._clock = clock
        self._unix_time = unix_time
        self._outbox_rows = outbox_rows
        self._batch_rows = batch_rows
        self._outbox: deque[UsageRow] = deque()
        self._wake = asyncio.Event()
        self._enough = asyncio.Event()
        # One batch at a time: the writer's loop and a flush while closing must not take the same rows.
        self._writing = asyncio.Lock()
        self._closing = asyncio.Event()
        self._written = 0
        self._lost = 0
        self._failures = 0

    @property
    def depth(self) -> int:
        """Rows that wait to be written."""
        return len(self._outbox)

    @property
    def written(self) -> int:
        """Rows that are durable, since the start."""
        return self._written

    @property
    def lost(self) -> int:
        """Rows that will never be written, since the start."""
        return self._lost

    @property
    def healthy(self) -> bool:
        """Whether the database took what was last asked of it."""
        return self._failures == 0

    async def open(self) -> None:
        """Get ready: the table is made when it is not there.

        A database that is away is no reason not to start: ``healthy`` is false then and :meth:`run` goes
        on trying. Raises LedgerUnavailable only for a url that can never work.
        """
        self._store.connect()
        try:
            async with asyncio.timeout(OPEN_S):
                await self._store.prepare()
        except Exception as error:
            self._failed(error)

    async def run(self) -> None:
        """The writer: sleeps until a row comes, writes, retries; ends after :meth:`close`.

        Lives in the lifespan's task group. Cancelling it loses nothing: rows leave the outbox only once
        they are durable.
        """
        while not self._closing.is_set():
            self._wake.clear()
            self._enough.clear()
            await self._flush(rest=self._rest, ended=self._closing.is_set)
            await self._wake.wait()
            await self._gather()

    def append(self, row: UsageRow) -> bool:
        """Take a row; never waits, never raises.

        ``False`` when the outbox is full or closed: then the row is lost, counted and told.
        """
        if self._closing.is_set():
            self._lose((row,), LossReason.CLOSED)
            return False
        if len(self._outbox) >= self._outbox_rows:
            self._lose((row,), LossReason.OUTBOX_FULL)
            return False
        self._outbox.append(row)
        self._wake.set()
        if len(self._outbox) >= min(self._batch_rows, self._outbox_rows // 2):
            self._enough.set()
        return True

    async def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, for at most ``timeout_s`` seconds, then let the database go.

        What cannot be written by then is lost, counted and told. Closing again does nothing.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.set()
        self._enough.set()
        try:
            if self._outbox:
                async with asyncio.timeout(timeout_s):
                    await self._flush(rest=asyncio.sleep, ended=lambda: False)
        except TimeoutError as error:
            self._failed(error)
        finally:
            left = tuple(self._outbox)
            self._outbox.clear()
            if left:
                self._lose(left, LossReason.CLOSED)
            await self._let_go()

    async def rows(self, *, limit: int = 100) -> list[UsageRow]:
        """The newest ``limit`` (1 to 10,000) durable rows, newest first.

        Raises LedgerUnavailable when the database cannot be read now.
        """
        if not 1 <= limit <= 10_000:
            raise ValueError(f"limit is {limit}; allowed: 1 to 10,000")
        # The lock, because in memory all share one connection, and giving it back rolls back.
        async with self._writing, asyncio.timeout(DATABASE_CALL_S):
            return await self._store.newest(limit)

    async def _let_go(self) -> None:
        try:
            await self._store.close(DISPOSE_S)
        except Exception as error:
            self._failed(error)

    async def _flush(self, *, rest: Callable[[float], Awaitable[None]], ended: Callable[[], bool]) -> None:
        """Write until nothing waits, resting longer and longer between failures, until ``ended``."""
        retrying = AsyncRetrying(
            sleep=rest,
            retry=retry_if_exception_type(Exception),
            wait=wait_exponential(multiplier=self._first_retry_s, max=LONGEST_RETRY_S),
            stop=lambda _: ended(),
            after=self._failed_try,
            # stopped: the rows are still in the outbox, for whoever flushes next
            retry_error_callback=lambda _: None,
        )
        while not ended():
            await retrying(self._write_batch)
            if not self._outbox:
                return

    async def _write_batch(self) -> None:
        async with self._writing, asyncio.timeout(DATABASE_CALL_S):
            batch = tuple(islice(self._outbox, self._batch_rows))
            began = self._clock()
            unwritable: frozenset[str] = frozenset()
            try:
                # an empty batch still makes the table: after a bad start, this is how it gets well
                await self._store.write(batch)
            except UnwritableRows as error:
                unwritable = error.generation_ids
            self._failures = 0
            if not (batch and self._outbox):
                return  # nothing to write, or given up by close() in the meantime, and told so
            # No await from here on: the rows are durable, and leave the outbox exactly once.
            for _ in batch:
                self._outbox.popleft()
            bad = tuple(row for row in batch if row.generation_id in unwritable)
            self._written += len(batch) - len(bad)
            if bad:
                self._lose(bad, LossReason.UNWRITABLE)
            took_s = self._clock() - began
            self._emit(RowsWritten(len(batch) - len(bad), len(self._outbox), took_s, self._unix_time()))

    async def _gather(self) -> None:
        """Let more rows come, but no more than a batch, and never so many that the outbox fills."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._gather_s):
                await self._enough.wait()

    async def _rest(self, seconds: float) -> None:
        """Rest, but no longer than until closing begins."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def _failed_try(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._failures += 1
        kind = type(getattr(error, "orig", None) or error).__name__
        self._emit(WriteFailed(kind, self._failures, len(self._outbox), self._unix_time()))

    def _lose(self, rows: Sequence[UsageRow], reason: LossReason) -> None:
        self._lost += len(rows)
        named = tuple(row.generation_id for row in rows[:MAX_NAMED])
        self._emit(RowsLost(len(rows), reason, named, self._unix_time()))
