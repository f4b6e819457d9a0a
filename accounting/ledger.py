"""The usage ledger: rows are taken without waiting, written in batches, and never billed twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Select
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from accounting.errors import LedgerUnavailable
from accounting.events import LedgerEvent, LossReason, RowsLost, RowsWritten, WriteFailed
from accounting.journal import Entry, Journal
from accounting.journal_replay import Replay
from accounting.store import GenerationStore, UnwritableRows
from accounting.values import EngineCount, UsageRow

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
# Longest that bringing the tables to this version's shape may take: 6.5 s for 500,000 rows of SQLite, once.
MIGRATE_S = 3_600.0
# What closing may take beyond its flush: a thread in a database call cannot be interrupted.
DISPOSE_S = 2.0
# How often to look for journals that other processes have left behind, and for rows to be read back.
ADOPT_S = 2.0


class Durability(StrEnum):
    """What an answer waits for before its tail goes out, and what happens when that cannot be had.

    * ``strict``: its row is on the disk; without that no answer, and no new work.
    * ``group``: its row is on the disk; without that the answer goes out, and the fault is told.
    * ``relaxed``: nothing; the row is on the disk some milliseconds later.
    * ``memory``: nothing, and there is no journal; the row is in the database some 0.1 s later.
    """

    STRICT = "strict"
    GROUP = "group"
    RELAXED = "relaxed"
    MEMORY = "memory"


class Ledger:
    """A journal and an outbox in memory in front of a table.

    ``append`` never waits, so the database's state costs no request anything. While the database is
    away, rows wait (``outbox_rows`` in memory, the others in the journal alone) and are tried again for as
    long as it takes. What is lost after all (no room, closed before written, a row that no database takes)
    is counted and told as :class:`~accounting.events.RowsLost`, never silent. Not for several threads.

    Args:
        url: ``sqlite+aiosqlite:///file`` or ``postgresql+asyncpg://…``.
        emit: takes each event; must not block.
        clock: seconds, monotonic.
        unix_time: seconds, for events.
        outbox_rows: most rows that wait in memory.
        batch_rows: most rows of one transaction.
        gather_s: how long a row may wait for others of its transaction, seconds.
        first_retry_s: rest after the first failure, seconds; doubles up to ``LONGEST_RETRY_S``.
        store: makes the store of a url.
        durability: what an answer waits for.
        journal_folder: of the journal; without one there is none, as with ``memory``.
        journal_bytes: most bytes of the journal.
        new_name: names the journal's files; names sort by time.
        adopt_s: between two looks for journals that were left behind and rows to be read back, seconds.
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
        durability: Durability = Durability.GROUP,
        journal_folder: Path | None = None,
        journal_bytes: int = 1 << 30,
        new_name: Callable[[], str] = lambda: "0",
        adopt_s: float = ADOPT_S,
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
        self._outbox: deque[Entry] = deque()
        self._wake = asyncio.Event()
        self._enough = asyncio.Event()
        # One batch at a time: the writer's loop and a flush while closing must not take the same rows.
        self._writing = asyncio.Lock()
        self._closing = asyncio.Event()
        self._written = 0
        self._lost = 0
        self._failures = 0
        self._durability = durability
        self._adopt_s = adopt_s
        self._journal: Journal | None = None
        self._replay: Replay | None = None
        if journal_folder is not None and durability is not Durability.MEMORY:
            self._journal = Journal(
                journal_folder,
                max_bytes=journal_bytes,
                new_name=new_name,
                not_kept=self._not_kept,
                emit=emit,
                clock=clock,
                unix_time=unix_time,
            )
            self._replay = Replay(
                self._journal,
                self._write_again,
                batch_rows=batch_rows,
                failed=self._failed,
                emit=emit,
                clock=clock,
                unix_time=unix_time,
            )

    @property
    def depth(self) -> int:
        """Rows that wait in memory to be written."""
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

    @property
    def lag_s(self) -> float:
        """For how long the oldest row has been on its way to the database; 0 when none is."""
        since = [self._outbox[0].at] if self._outbox else []
        if self._replay is not None and self._replay.since is not None:
            since.append(self._replay.since)
        return max(0.0, self._clock() - min(since)) if since else 0.0

    @property
    def journal_bytes(self) -> int:
        """Bytes of this process' journal."""
        return 0 if self._journal is None else self._journal.size_bytes

    @property
    def journal_working(self) -> bool:
        """Whether rows are journaled, where they are meant to be."""
        return self._journal is None or self._journal.working

    @property
    def accepts(self) -> bool:
        """Whether work may begin whose row comes later; false only when ``strict`` has no journal."""
        return self._durability is not Durability.STRICT or (
            self._journal is not None and self._journal.working
        )

    async def open(self) -> None:
        """Get ready: the tables are made, or brought to this version's shape.

        A database that is away is no reason not to start: ``healthy`` is false then and :meth:`run` goes
        on trying. Raises LedgerUnavailable only for a url that can never work, or a journal's folder.
        """
        self._store.connect()
        if self._journal is not None:
            self._journal.open()
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
        async with asyncio.TaskGroup() as both:
            if self._replay is not None:
                both.create_task(self._read_back(self._replay))
            await self._write_on()

    async def _read_back(self, replay: Replay) -> None:
        while not self._closing.is_set():
            await replay.once(caught_up=self.healthy and len(self._outbox) < self._batch_rows)
            await self._rest(self._adopt_s)

    async def _write_on(self) -> None:
        while not self._closing.is_set():
            self._wake.clear()
            self._enough.clear()
            await self._flush(rest=self._rest, ended=self._closing.is_set)
            await self._wake.wait()
            await self._gather()

    def append(self, row: UsageRow) -> bool:
        """Take a row; never waits, never raises.

        ``False`` when there is no room for it, or all is closed: then the row is lost, counted and told.
        """
        if self._closing.is_set():
            self._lose((row,), LossReason.CLOSED)
            return False
        entry = Entry(row, self._clock(), held=len(self._outbox) < self._outbox_rows)
        journaled = self._journal is not None and self._journal.append(entry)
        if entry.held:
            self._hold(entry)
        elif not journaled:
            self._lose((row,), LossReason.OUTBOX_FULL)
            return False
        elif self._replay is not None:
            self._replay.spilled(entry.at)
        return True

    async def durable(self) -> bool:
        """Wait for the journal, as ``durability`` says; ``False``: no answer may go out."""
        if self._journal is None or self._durability is Durability.RELAXED:
            return self._durability is not Durability.STRICT
        kept = await self._journal.durable()
        return kept or self._durability is not Durability.STRICT

    async def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, for at most ``timeout_s`` seconds, then let the database go.

        What cannot be written by then stays in the journal for the next start; what is not there either is
        lost, counted and told. Closing again does nothing.
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
            if self._journal is not None:
                await self._journal.close()
            left = tuple(entry.row for entry in self._outbox if entry.segment is None)
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
        async with self._reading():
            return await self._store.newest(limit)

    async def select(self, query: Select[Any]) -> list[dict[str, Any]]:
        """What a query finds. Raises LedgerUnavailable when the database cannot be read now."""
        async with self._reading():
            return await self._store.select(query)

    async def keep_counts(self, counts: Sequence[EngineCount]) -> None:
        """Keep what engines counted. Raises LedgerUnavailable when the database is away."""
        if counts:
            async with self._reading():
                await self._store.keep_counts(counts)

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        # In memory all share one connection, and giving it back rolls back.
        lock = self._writing if self._store.in_memory else contextlib.nullcontext()
        try:
            async with asyncio.timeout(DATABASE_CALL_S), lock:
                yield
        except TimeoutError as error:
            raise LedgerUnavailable("the ledger cannot be read now (TimeoutError)") from error

    async def _let_go(self) -> None:
        try:
            await self._store.close(DISPOSE_S)
        except Exception as error:
            self._failed(error)

    # From memory to the database

    def _hold(self, entry: Entry) -> None:
        self._outbox.append(entry)
        self._wake.set()
        if len(self._outbox) >= min(self._batch_rows, self._outbox_rows // 2):
            self._enough.set()

    def _not_kept(self, entry: Entry) -> None:
        """The journal could not keep a row that is nowhere else."""
        if len(self._outbox) < self._outbox_rows and not self._closing.is_set():
            entry.held = True
            self._hold(entry)
        else:
            self._lose((entry.row,), LossReason.OUTBOX_FULL)

    async def _flush(self, *, rest: Callable[[float], Awaitable[None]], ended: Callable[[], bool]) -> None:
        """Write until nothing waits, resting longer and longer between failures, until ``ended``."""
        retrying = self._retrying(rest, ended)
        while not ended():
            await retrying(self._write_batch)
            if not self._outbox:
                return

    def _retrying(self, rest: Callable[[float], Awaitable[None]], ended: Callable[[], bool]) -> AsyncRetrying:
        return AsyncRetrying(
            sleep=rest,
            retry=retry_if_exception_type(Exception),
            wait=wait_exponential(multiplier=self._first_retry_s, max=LONGEST_RETRY_S),
            stop=lambda _: ended(),
            after=self._failed_try,
            # stopped: the rows are still in the outbox, for whoever flushes next
            retry_error_callback=lambda _: None,
        )

    async def _write_batch(self) -> None:
        async with self._writing, self._bounded():
            batch = tuple(islice(self._outbox, self._batch_rows))
            began = self._clock()
            unwritable: frozenset[str] = frozenset()
            try:
                # an empty batch still makes the table: after a bad start, this is how it gets well
                await self._store.write([entry.row for entry in batch])
            except UnwritableRows as error:
                unwritable = error.generation_ids
            self._failures = 0
            if not (batch and self._outbox):
                return  # nothing to write, or given up by close() in the meantime, and told so
            # No await from here on: the rows are durable, and leave the outbox exactly once.
            for entry in batch:
                self._outbox.popleft()
                if self._journal is not None:
                    self._journal.written(entry)
            bad = tuple(entry.row for entry in batch if entry.row.generation_id in unwritable)
            self._written += len(batch) - len(bad)
            if bad:
                self._lose(bad, LossReason.UNWRITABLE)
            took_s = self._clock() - began
            self._emit(RowsWritten(len(batch) - len(bad), len(self._outbox), took_s, self._unix_time()))

    def _bounded(self) -> asyncio.Timeout:
        """The bound of a call; the first may bring a large table to another shape before it writes."""
        return asyncio.timeout(DATABASE_CALL_S if self._store.prepared else MIGRATE_S)

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

    async def _write_again(self, rows: Sequence[UsageRow]) -> bool:
        """Write rows of the journal; ``False``: closing came first."""
        return bool(await self._retrying(self._rest, self._closing.is_set)(self._write_rows, rows))

    async def _write_rows(self, rows: Sequence[UsageRow]) -> bool:
        async with self._writing, self._bounded():
            try:
                await self._store.write(rows)
            except UnwritableRows as error:
                bad = tuple(row for row in rows if row.generation_id in error.generation_ids)
                self._lose(bad, LossReason.UNWRITABLE)
        self._failures = 0
        return True

    # What went wrong

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
