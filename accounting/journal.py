"""The write-ahead journal: usage rows are on disk before the end of an answer is sent.

The event loop gathers rows into groups; a thread writes and syncs one group while the next one gathers (group
commit). All rows of a group share one sync, and the event loop never blocks on the disk.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from msgspec import Struct, field

from accounting.errors import LedgerUnavailable
from accounting.events import (
    JournalFailed,
    JournalIsBack,
    JournalRefusal,
    JournalRefused,
    JournalSynced,
    error_kind,
)
from accounting.journal_files import JournalSegment, create, orphans
from accounting.journal_records import HEADER, NotEncodable, frame
from accounting.options import Durability, LedgerOptions
from accounting.values import UsageRow

# Longest file: about 20,000 rows. A file stays open until the database has all its rows, so 1 GiB of waiting
# rows are 64 open files.
SEGMENT_BYTES: Final = 16 << 20
# ``rotate`` closes the file in use when it is longer, so that it can be deleted: after a kill at most a few
# files of this size are read again in vain.
ROTATE_BYTES: Final = 1 << 20
CLOSE_S: Final = 2.0  # longest that closing waits for the last group


class PendingRow(Struct, eq=False):
    """A row that arrived at ``at`` on the clock. A row that is not ``held`` in memory is read back from the
    journal. ``segment`` is its file after the sync; ``written``: the database has the row.
    """

    row: UsageRow
    at: float
    held: bool = True
    segment: JournalSegment | None = None
    written: bool = False


class _Group(Struct, eq=False):
    """Rows that share a sync."""

    entries: list[PendingRow] = []
    data: bytearray = field(default_factory=bytearray)
    waiting: list[asyncio.Future[bool]] = []
    done: bool = False
    synced: bool = False

    def end(self, durable: bool) -> None:
        """Mark the group done and give the waiters their result; a second call does nothing."""
        self.done = True
        for ended in self.waiting:
            if not ended.done():
                ended.set_result(durable)
        self.waiting.clear()


class Journal:
    """One process' files in a folder that the processes of one machine share. Not thread-safe.

    A full or failing disk fails no request: the journal emits an event and tries every ``journal_rest_s``
    seconds to begin another file. Until one is begun, rows are only in memory, and :meth:`durable` gives
    ``False`` when ``strict``. ``on_lost`` is called for each row that is neither in memory nor in a file.
    Names from ``new_name`` must sort by time.
    """

    def __init__(
        self, folder: Path, options: LedgerOptions, *, on_lost: Callable[[PendingRow], None]
    ) -> None:
        self._folder = folder
        self._options = options
        self._on_lost = on_lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._gathering = _Group()
        self._syncing: _Group | None = None
        self._strict = options.durability is Durability.STRICT
        relaxed = options.durability is Durability.RELAXED
        self._gap_s = options.relaxed_sync_gap_s if relaxed else options.sync_gap_s
        self._handed_at = float("-inf")
        self._late: asyncio.TimerHandle | None = None
        self._stopped = False
        self._failing = False
        self._rest: asyncio.TimerHandle | None = None
        self._full = False
        self._segments: set[JournalSegment] = set()
        self._unread: deque[JournalSegment] = deque()
        # Bytes of this process' files, and of those that it adopted.
        self.size_bytes = 0
        # The file in use; only the thread accesses this attribute.
        self._active: JournalSegment | None = None

    # State

    @property
    def working(self) -> bool:
        """Whether rows are journaled: there is room, and the disk works."""
        return not self._full and not self._failing

    def open(self) -> None:
        """Create the folder and start the thread. Raises LedgerUnavailable if the folder cannot be made."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerUnavailable(
                f"ledger.journal_folder: {self._folder} cannot be made ({type(error).__name__}); "
                "allowed: a folder that the gateway may write to"
            ) from error
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="ledger-journal", daemon=True)
        self._thread.start()

    # Rows

    def append(self, entry: PendingRow) -> bool:
        """Add a row to the next group; never waits or raises. Returns ``False`` when the journal is full,
        failing or closed, or the row cannot be encoded.
        """
        if self._loop is None or self._stopped:
            return False
        if self._failing:
            return self._refuse(JournalRefusal.FAILING)
        try:
            data = frame(entry.row)
        except NotEncodable:
            return self._refuse(JournalRefusal.UNENCODABLE)
        ahead = len(self._syncing.data) if self._syncing is not None else 0
        group = self._gathering
        if self.size_bytes + ahead + len(group.data) + len(data) > self._options.journal_bytes:
            self._full = True
            return self._refuse(JournalRefusal.FULL)
        self._full = False
        group.entries.append(entry)
        group.data += data
        if self._syncing is None and len(group.entries) == 1:
            self._hand_over_soon(self._loop)
        return True

    def durable(self) -> asyncio.Future[bool]:
        """Done when all appended rows are synced, or after ``sync_wait_s``; its result is whether they are,
        but always true unless ``strict``.
        """
        # A future of its own: cancelling one waiter does not affect the others.
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        group = self._gathering if self._gathering.entries else self._syncing
        if group is None or group.done:
            synced = group is None or group.synced
            ended.set_result(not self._strict or (synced and self.working))
        else:
            group.waiting.append(ended)
        return ended

    def written(self, entry: PendingRow) -> None:
        """Note that the database has this row; delete its file when that was the last one."""
        entry.written = True
        segment = entry.segment
        if segment is not None and entry.held:
            segment.waiting -= 1
            if segment.closed:
                self._reclaim(segment)

    def rotate(self, *, read_back: bool) -> None:
        """Close the file in use if it is long or, with ``read_back``, has rows that are not in memory."""
        if any(
            not one.closed and (one.size > ROTATE_BYTES or (read_back and one.spilled))
            for one in self._segments
        ):
            self._work.put(self._close_active)

    @property
    def spilled(self) -> bool:
        """Whether some rows are only in files."""
        return any(one.spilled for one in self._segments)

    def unread(self) -> JournalSegment | None:
        """The next closed file of this process to be read back; each is returned once."""
        return self._unread.popleft() if self._unread else None

    def done(self, segment: JournalSegment, *, damaged: bool = False) -> None:
        """Delete a file whose rows are all in the database; a ``damaged`` one is set aside instead."""
        self._forget(segment)
        self._work.put(partial(self._attempt, segment.set_aside if damaged else segment.remove))

    def abandon(self, segment: JournalSegment) -> None:
        """Release a file that was not read back, so that another process can adopt it."""
        self._forget(segment)
        segment.release()

    def orphans(self) -> list[JournalSegment]:
        """Lock and return the files of ended processes. Blocks. Raises OSError."""
        return list(orphans(self._folder))

    def adopt(self, adopted: list[JournalSegment]) -> None:
        """Count files of ended processes, so that restarts in a long outage do not exceed the limit."""
        self._segments.update(adopted)
        self.size_bytes += sum([segment.size for segment in adopted])

    async def close(self) -> None:
        """Sync waiting rows, for :data:`CLOSE_S` at most; delete files whose rows are all in the database."""
        if self._thread is None or self._loop is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._gathering.entries or self._syncing is not None:
                    await self.durable()
                    await asyncio.sleep(0.001)  # a timed-out group is done before it is synced
        self._stopped = True
        for timer in (self._late, self._rest):
            if timer is not None:
                timer.cancel()
        self._late = self._rest = None
        segments = tuple(self._segments)
        self._segments.clear()
        for segment in segments:
            unread = segment.waiting or segment.spilled
            self._work.put(partial(self._attempt, segment.release if unread else segment.remove))
        self._work.put(partial(self._attempt, self._remove_unused))
        self._work.put(None)
        # The disk may block the thread; as a daemon it does not keep the process alive.
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        self.size_bytes = 0

    # The loop's side

    def _hand_over_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        rest_s = self._handed_at + self._gap_s - loop.time()
        if rest_s > 0:
            loop.call_later(rest_s, self._hand_over)
        else:
            # Not immediately: rows of the same event loop iteration share the sync.
            loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        group = self._gathering
        if self._loop is None or self._syncing is not None or not group.entries:
            return
        self._gathering, self._syncing = _Group(), group
        self._handed_at = self._loop.time()
        if self._late is None:
            self._late = self._loop.call_later(self._options.sync_wait_s, self._check_sync, self._loop)
        self._work.put(partial(self._store, group))

    def _check_sync(self, loop: asyncio.AbstractEventLoop) -> None:
        """When the sync of a group takes too long, end the waits for it and for the next group.

        The group may still be synced later. One timer serves all groups, so that requests set none.
        """
        self._late, group = None, self._syncing
        if group is None or group.done:
            return
        rest_s = self._handed_at + self._options.sync_wait_s - loop.time()
        if rest_s > 0:
            self._late = loop.call_later(rest_s, self._check_sync, loop)
            return
        self._fail("Timeout", len(group.entries))
        group.end(not self._strict)
        self._gathering.end(not self._strict)

    def _stored(
        self, group: _Group, segment: JournalSegment | None, error: OSError | None, took_s: float
    ) -> None:
        self._syncing = None
        if segment is not None:
            self._works_again()
            group.synced = True
            new = segment not in self._segments
            self._segments.add(segment)
            self.size_bytes += segment.size if new else len(group.data)
            for entry in group.entries:
                if entry.written:
                    continue
                entry.segment = segment
                if entry.held:
                    segment.waiting += 1
                else:
                    segment.spilled = True
            self._options.emit(JournalSynced(len(group.entries), took_s))
        else:
            self._fail(error_kind(error), len(group.entries))
            for entry in group.entries:
                if not entry.held:
                    self._on_lost(entry)
        group.end(not self._strict or (group.synced and self.working))
        if self._loop is not None and self._gathering.entries:
            self._hand_over_soon(self._loop)

    def _closed(self, segment: JournalSegment) -> None:
        segment.closed = True
        if segment in self._segments:
            self._reclaim(segment)
        elif segment.size <= len(HEADER):  # no row of this file was synced
            self._work.put(partial(self._attempt, segment.remove))

    def _reclaim(self, segment: JournalSegment) -> None:
        """Delete a closed file without unwritten rows, or queue it to be read back."""
        if segment.waiting or segment not in self._segments:
            return  # with waiting rows, or released by close()
        if segment.spilled:
            self._unread.append(segment)
        else:
            self.done(segment)

    def _forget(self, segment: JournalSegment) -> None:
        if segment in self._segments:
            self._segments.discard(segment)
            self.size_bytes -= segment.size
            self._full = False

    def _refuse(self, reason: JournalRefusal) -> bool:
        self._options.emit(JournalRefused(reason))
        return False

    def _fail(self, error_type: str, rows: int) -> None:
        self._options.emit(JournalFailed(error_type, rows))
        self._try_later()

    def _try_later(self) -> None:
        self._failing = True
        if self._rest is None and self._loop is not None and not self._stopped:
            self._rest = self._loop.call_later(self._options.journal_rest_s, self._try_again)

    def _try_again(self) -> None:
        self._rest = None
        if self._failing:
            self._work.put(self._begin_file)

    def _works_again(self) -> None:
        if self._failing:
            self._failing = False
            self._options.emit(JournalIsBack())

    # The thread's side

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _store(self, group: _Group) -> None:
        began = self._options.clock()
        try:
            active = self._active
            if active is not None and active.size + len(group.data) > SEGMENT_BYTES:
                self._close_active()
                active = None
            if active is None:
                active = self._active = create(self._folder, self._options.new_name)
            active.write(bytes(group.data))
        except OSError as error:
            # Earlier rows in this file are synced; after a failed write its end is undefined.
            self._close_active()
            self._call_loop(self._stored, group, None, error, 0.0)
        else:
            self._call_loop(self._stored, group, active, None, self._options.clock() - began)

    def _begin_file(self) -> None:
        try:
            if self._active is None:
                self._active = create(self._folder, self._options.new_name)
        except OSError:
            self._call_loop(self._try_later)
        else:
            self._call_loop(self._works_again)

    def _remove_unused(self) -> None:
        if self._active is not None and self._active.size <= len(HEADER):
            self._active.remove()

    def _close_active(self) -> None:
        active, self._active = self._active, None
        if active is not None:
            self._call_loop(self._closed, active)

    def _attempt(self, doing: Callable[[], None]) -> None:
        try:
            doing()
        except OSError as error:
            # The file stays and is read again later; no row is billed twice by that.
            self._call_loop(self._fail, error_kind(error), 0)

    def _call_loop(self, what: Callable[..., None], *values: Any) -> None:
        # RuntimeError: the event loop is closed, so nothing waits for the call.
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(what, *values)
            except RuntimeError:
                return
