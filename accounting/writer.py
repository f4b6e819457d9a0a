"""The outbox: rows wait in memory and are written to the database in batches, with retries."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

from accounting.events import DatabaseIsBack, LossReason, RowsLost, RowsWritten, WriteFailed, error_kind
from accounting.journal import PendingRow
from accounting.options import LedgerOptions
from accounting.store import GenerationStore
from accounting.values import UsageRow

LONGEST_RETRY_S = 5.0
MAX_NAMED = 20  # most generation ids in one ``RowsLost``
DATABASE_CALL_S = 30.0  # timeout of one database call
MIGRATE_S = 3_600.0  # timeout of a migration, which may copy a large table


class Writer:
    """The rows in memory, and the loop that writes them. Not thread-safe. ``done`` is called for each row
    that was written, or that the database has refused for good.
    """

    def __init__(
        self, store: GenerationStore, options: LedgerOptions, *, done: Callable[[PendingRow], None]
    ) -> None:
        self._store = store
        self._options = options
        self._done = done
        self._outbox: deque[PendingRow] = deque()
        self._enough_rows = min(options.batch_rows, options.outbox_rows // 2)
        self._wake = asyncio.Event()
        self._enough = asyncio.Event()
        # One batch at a time: the writer's loop and the flush at closing must not take the same rows.
        self.write_lock = asyncio.Lock()
        # Whether :meth:`stop` was called, and the event that signals it.
        self.closing = False
        self._closed = asyncio.Event()
        self._failures = 0

    @property
    def depth(self) -> int:
        """Number of waiting rows."""
        return len(self._outbox)

    @property
    def oldest_at(self) -> float | None:
        """Arrival time of the oldest waiting row, in seconds on the clock; ``None`` without one."""
        return self._outbox[0].at if self._outbox else None

    @property
    def healthy(self) -> bool:
        """Whether the last database call succeeded."""
        return self._failures == 0

    @property
    def caught_up(self) -> bool:
        """Whether the database works and less than a batch waits."""
        return self.healthy and len(self._outbox) < self._options.batch_rows

    def hold(self, entry: PendingRow) -> bool:
        """Add a row if there is room, and return whether there was."""
        entry.held = len(self._outbox) < self._options.outbox_rows
        if entry.held:
            self._outbox.append(entry)
            self._wake.set()
            if len(self._outbox) >= self._enough_rows:
                self._enough.set()
        return entry.held

    async def run(self) -> None:
        """Write rows as they come, until :meth:`stop`. Cancelling it loses no row: rows leave only when
        durable.
        """
        while not self.closing:
            self._wake.clear()
            await self._retrying(self._write_batch)
            if not self._outbox:
                await self._wake.wait()
            # Also for rows that arrived during a write: without a pause, each would get its own transaction.
            await self._gather()

    def stop(self) -> None:
        """End :meth:`run` and all its pauses."""
        self.closing = True
        self._closed.set()
        self._wake.set()
        self._enough.set()

    async def write_the_rest(self) -> None:
        """Write until no row waits; called after :meth:`stop`."""
        while self._outbox:
            await self._retrying(self._write_batch, also_closing=True)

    def take_remaining(self) -> tuple[PendingRow, ...]:
        """Remove and return the waiting rows."""
        left = tuple(self._outbox)
        self._outbox.clear()
        return left

    async def write_again(self, rows: Sequence[UsageRow]) -> bool:
        """Write rows that were read back from the journal; ``False`` if closing began before."""

        async def write() -> None:
            async with self.write_lock, self._bounded():
                self.lose(await self._store.write(rows), LossReason.UNWRITABLE)
            self._worked()

        return await self._retrying(write)

    async def rest(self, seconds: float) -> None:
        """Pause for ``seconds``, or until closing begins."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    # Batches

    async def _retrying(self, write: Callable[[], Awaitable[None]], *, also_closing: bool = False) -> bool:
        """Call ``write`` until it succeeds, with growing pauses after failures; ``False`` when closing began,
        unless it is ``also_closing``.
        """
        pause_s = self._options.first_retry_s
        while also_closing or not self.closing:
            try:
                await write()
                return True
            except Exception as error:
                self.failed(error)
            await (asyncio.sleep(pause_s) if also_closing else self.rest(pause_s))
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)
        return False

    async def _write_batch(self) -> None:
        async with self.write_lock, self._bounded():
            batch = tuple(islice(self._outbox, self._options.batch_rows))
            # an empty batch still creates the tables, so that a failed start recovers
            unwritable = await self._store.write([entry.row for entry in batch])
            self._worked()
            if not (batch and self._outbox):
                return  # nothing to write, or removed by closing in the meantime
            # No await from here on: the rows are durable and leave the outbox exactly once.
            for entry in batch:
                self._outbox.popleft()
                self._done(entry)
            self.lose(unwritable, LossReason.UNWRITABLE)
            self._options.emit(RowsWritten(len(batch) - len(unwritable)))

    def _bounded(self) -> asyncio.Timeout:
        """The timeout of a call; the first call may migrate a large table before it writes."""
        return asyncio.timeout(DATABASE_CALL_S if self._store.prepared else MIGRATE_S)

    async def _gather(self) -> None:
        """Wait ``gather_s`` for more rows; less when a batch is complete or the outbox is half full."""
        if len(self._outbox) >= self._enough_rows or self.closing:
            return
        self._enough.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.gather_s):
                await self._enough.wait()

    # Failures

    def failed(self, error: BaseException) -> None:
        """Report an error of the database or of a file."""
        self._failures += 1
        self._options.emit(WriteFailed(error_kind(error), self._failures, len(self._outbox)))

    def _worked(self) -> None:
        if self._failures:
            self._options.emit(DatabaseIsBack(self._failures))
            self._failures = 0

    def lose(self, rows: Sequence[UsageRow], reason: LossReason) -> None:
        """Report rows, if there are any, that will never be written."""
        if rows:
            named = tuple(row.generation_id for row in rows[:MAX_NAMED])
            self._options.emit(RowsLost(len(rows), reason, named))
