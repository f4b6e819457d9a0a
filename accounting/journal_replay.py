"""Reads rows back from the journal: those that did not fit into memory, and those of ended processes."""

import asyncio

from accounting.events import RowsReplayed
from accounting.journal import Journal
from accounting.journal_files import JournalSegment
from accounting.journal_records import read
from accounting.options import LedgerOptions
from accounting.writer import Writer


class Replay:
    """Reads files back, and deletes each one after its rows are in the database.

    If the process is killed in between, the file is read again; rows already in the database stay unchanged.
    """

    def __init__(self, journal: Journal, writer: Writer, options: LedgerOptions) -> None:
        self._journal = journal
        self._writer = writer
        self._options = options
        # Arrival time, on the clock, of the first row that waits to be read back.
        self.since: float | None = None

    def spilled(self, at: float) -> None:
        """Note that a row, which arrived ``at`` this time, is only in the journal."""
        if self.since is None:
            self.since = at

    async def once(self, *, caught_up: bool) -> None:
        """Read back all closed files; if the writer has ``caught_up``, close the file in use for it too."""
        try:
            adopted = await asyncio.to_thread(self._journal.orphans)
        except OSError as error:
            self._writer.failed(error)
            adopted = []
        if adopted:
            self._journal.adopt(adopted)
            # A restart during an outage of the database must not make its rows look new.
            age_s = self._options.unix_time() - min(segment.written_at for segment in adopted)
            self.spilled(self._options.clock() - max(0.0, age_s))
        for number, segment in enumerate(adopted):
            if not await self._segment(segment, adopted=True):
                for other in adopted[number + 1 :]:
                    self._journal.abandon(other)
                return
        self._journal.rotate(read_back=caught_up)
        while (own := self._journal.unread()) is not None:
            if not await self._segment(own, adopted=False):
                return
        if not self._journal.spilled:
            self.since = None

    async def _segment(self, segment: JournalSegment, *, adopted: bool) -> bool:
        """Read one file back; ``False`` when the writer was closed before all rows were written."""
        try:
            contents = await asyncio.to_thread(lambda: read(segment.path.read_bytes()))
        except OSError as error:
            self._writer.failed(error)
            self._journal.abandon(segment)
            return True
        for start in range(0, len(contents.rows), self._options.batch_rows):
            if not await self._writer.write_again(contents.rows[start : start + self._options.batch_rows]):
                self._journal.abandon(segment)
                return False
        self._journal.done(segment, damaged=contents.damaged)
        bad_bytes = contents.torn_bytes if contents.damaged else 0
        self._options.emit(RowsReplayed(len(contents.rows), adopted, bad_bytes))
        return True
