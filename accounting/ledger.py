"""The usage ledger: it accepts rows without waiting, writes them in batches, and never bills one twice."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from sqlalchemy import Select

from accounting.errors import LedgerUnavailable
from accounting.events import LossReason
from accounting.journal import Journal, PendingRow
from accounting.journal_replay import Replay
from accounting.options import Durability, LedgerOptions
from accounting.store import GenerationStore
from accounting.values import DAY_S, EngineCount, UsageRow
from accounting.writer import DATABASE_CALL_S, Writer

OPEN_S = 5.0  # longest time that the start waits for a database that does not answer
# Time after the flush to close the connections: a thread in a database call cannot be interrupted.
DISPOSE_S = 2.0


class Ledger:
    """A journal and an outbox in memory in front of a table. Not thread-safe.

    ``append`` never waits, so the database never delays a request. While the database is unavailable, rows
    wait (``outbox_rows`` in memory, the others in the journal only) and writes are retried for ever. Lost
    rows (no room, closed before written, refused by the database) are reported as
    :class:`~accounting.events.RowsLost`. ``url`` is ``sqlite+aiosqlite:///file`` or
    ``postgresql+asyncpg://…``.
    """

    def __init__(
        self,
        url: str,
        options: LedgerOptions,
        *,
        store: Callable[[str], GenerationStore] = GenerationStore,
    ) -> None:
        self._store = store(url)
        self._options = options
        self._clock = options.clock
        self._durability = options.durability
        folder = None if options.durability is Durability.MEMORY else options.journal_folder
        self._journal = None if folder is None else Journal(folder, options, on_lost=self._row_lost)
        done = (lambda entry: None) if self._journal is None else self._journal.written
        self._writer = Writer(self._store, options, done=done)
        self._replay = None if self._journal is None else Replay(self._journal, self._writer, options)

    @property
    def depth(self) -> int:
        """Number of rows in memory that wait to be written."""
        return self._writer.depth

    @property
    def healthy(self) -> bool:
        """Whether the last call of the database succeeded."""
        return self._writer.healthy

    @property
    def lag_s(self) -> float:
        """Age in seconds of the oldest row that is not in the database; 0 without one."""
        since = (self._writer.oldest_at, None if self._replay is None else self._replay.since)
        waiting = [at for at in since if at is not None]
        return max(0.0, self._clock() - min(waiting)) if waiting else 0.0

    @property
    def journal_bytes(self) -> int:
        return 0 if self._journal is None else self._journal.size_bytes

    @property
    def journal_working(self) -> bool:
        """Whether the journal works; true when none is configured."""
        return self._journal is None or self._journal.working

    @property
    def accepts(self) -> bool:
        """Whether new work may start; false only when ``strict`` has no working journal."""
        return self._durability is not Durability.STRICT or (
            self._journal is not None and self._journal.working
        )

    async def open(self) -> None:
        """Create the tables, or migrate them to this version.

        An unavailable database does not prevent the start: ``healthy`` is false then, and :meth:`run` keeps
        trying. Raises LedgerUnavailable for a url that can never work, or an unusable journal folder.
        """
        self._store.connect()
        if self._journal is not None:
            self._journal.open()
        try:
            async with asyncio.timeout(OPEN_S):
                await self._store.prepare()
        except Exception as error:
            self._writer.failed(error)

    async def run(self) -> None:
        """Write rows until :meth:`close`. Cancelling it loses no row: rows leave the outbox only when
        durable.
        """
        async with asyncio.TaskGroup() as both:
            if self._replay is not None:
                both.create_task(self._read_back(self._replay))
            both.create_task(self._sum_days())
            await self._writer.run()

    async def _read_back(self, replay: Replay) -> None:
        while not self._writer.closing:
            await replay.once(caught_up=self._writer.caught_up)
            await self._writer.rest(self._options.adopt_s)

    async def _sum_days(self) -> None:
        """Sum up past days, one after the other, so that reports need not read their rows."""
        while not self._writer.closing:
            await self._writer.rest(self._options.sum_s)
            more = self._store.prepared
            while more and not self._writer.closing:
                # Under the writer's lock: SQLite allows one write at a time.
                async with self._writer.write_lock:
                    try:
                        more = await self._store.sum_a_day(int(self._options.unix_time() // DAY_S))
                    except LedgerUnavailable:
                        more = False  # the writer reports the error; usage reports read the rows until then

    def append(self, row: UsageRow) -> bool:
        """Accept a row; never waits or raises. Returns ``False`` when there is no room, or after closing: the
        row is lost and reported.
        """
        if self._writer.closing:
            self._writer.lose((row,), LossReason.CLOSED)
            return False
        entry = PendingRow(row, self._clock())
        journaled = self._journal is not None and self._journal.append(entry)
        if self._writer.hold(entry):
            return True
        if not journaled:
            self._writer.lose((row,), LossReason.OUTBOX_FULL)
            return False
        if self._replay is not None:
            self._replay.spilled(entry.at)
        return True

    def durable(self) -> Awaitable[bool]:
        """Wait for the journal if ``durability`` asks for it; ``False`` means that no answer may be sent."""
        if self._journal is None or self._durability is Durability.RELAXED:
            return _known(self._durability is not Durability.STRICT)
        return self._journal.durable()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Write waiting rows, for at most ``timeout_s`` seconds, then close the database. The other rows stay
        in the journal for the next start; without a journal they are lost and reported.
        """
        if self._writer.closing:
            return
        self._writer.stop()
        try:
            async with asyncio.timeout(timeout_s):
                await self._writer.write_the_rest()
        except TimeoutError as error:
            self._writer.failed(error)
        finally:
            if self._journal is not None:
                await self._journal.close()
            left = [entry.row for entry in self._writer.take_remaining() if entry.segment is None]
            self._writer.lose(left, LossReason.CLOSED)
            try:
                await self._store.close(DISPOSE_S)
            except Exception as error:
                self._writer.failed(error)

    async def select(self, query: Select[Any]) -> list[dict[str, Any]]:
        """The result of a query. Raises LedgerUnavailable."""
        async with self._reading():
            return await self._store.select(query)

    async def write_counts(self, counts: Sequence[EngineCount]) -> None:
        """Store engines' counts. Raises LedgerUnavailable."""
        if counts:
            async with self._reading():
                await self._store.write_counts(counts)

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        # With SQLite in memory all callers share one connection, and returning it to the pool rolls back.
        lock = self._writer.write_lock if self._store.in_memory else contextlib.nullcontext()
        try:
            async with asyncio.timeout(DATABASE_CALL_S), lock:
                yield
        except TimeoutError as error:
            raise LedgerUnavailable("the ledger cannot be read now (TimeoutError)") from error

    def _row_lost(self, entry: PendingRow) -> None:
        """Keep a row in memory that the journal could not store; without room it is lost."""
        if self._writer.closing or not self._writer.hold(entry):
            self._writer.lose((entry.row,), LossReason.OUTBOX_FULL)


async def _known(durable: bool) -> bool:
    return durable
