"""A SQLite file that several processes of a machine write; each has one connection, used by one thread."""

import asyncio
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from accounting.events import error_kind
from gateway.state.errors import StateUnavailable

BUSY_TIMEOUT_S = 2.0
# Seconds between two attempts. SQLite's own waits grow to 100 ms; a busier process would always be first.
BUSY_RETRY_S = 0.0005
# The most operations that wait for the thread.
MAX_WAITING = 1_024
_NOTHING_WRITTEN = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL}
LOCKED = "locked"  # the reason of StateUnavailable when another process holds the file

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Operation:
    act: Callable[[sqlite3.Connection], Any]
    writes: bool
    result: Future[Any]


@dataclass(eq=False)
class SqliteFile:
    """Runs transactions; opens the file again if it was removed or replaced.

    Operations that wait for the thread at the same moment share one transaction.

    Args:
        path: the file, whose folder must exist; ``:memory:`` is a private database in memory.
        tables: statements that create the tables unless they exist.
        synchronous: SQLite's pragma. With ``OFF`` a damaged file is deleted: its content need not survive.
        busy_timeout_s: longest wait for another process's write, in seconds.
    """

    path: Path
    tables: Sequence[str]
    synchronous: Literal["OFF", "NORMAL", "FULL"]
    busy_timeout_s: float = BUSY_TIMEOUT_S

    def __post_init__(self) -> None:
        self._names = str(self.path), f"{self.path}-wal"  # a Path takes longer than the system call
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"sqlite-{self.path.name}")
        self._waiting: deque[_Operation] = deque()
        # Only the thread uses these.
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, ...] | None = None

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    async def run(self, operation: str, act: Callable[[sqlite3.Connection], T], *, writes: bool = True) -> T:
        """Return the result of ``act`` in a transaction, which is repeated while the file is locked: ``act``
        may be called again after a call whose changes were undone.

        Raises StateUnavailable, and the errors of ``act``.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise StateUnavailable(operation, f"{MAX_WAITING} operations wait")
        result: Future[T] = Future()
        self._waiting.append(_Operation(act, writes, result))
        self._thread.submit(self._work)
        try:
            return await asyncio.wrap_future(result)
        except (sqlite3.Error, OSError) as error:
            reason = LOCKED if _is_locked(error) else error_kind(error)
            # The low byte is the error without its details. All of these are raised before a commit.
            refused = getattr(error, "sqlite_errorcode", 0) & 0xFF in _NOTHING_WRITTEN
            raise StateUnavailable(operation, reason, writes_refused=refused) from error

    def files(self) -> Sequence[tuple[int, ...] | None]:
        """Return identity, size and last write time of the file and of its log, which a commit changes.

        A commit within one tick of the file system's clock, a few ms, after another may not change them.
        """
        return list(map(_stat, self._names))

    def _work(self) -> None:
        """Execute the operations that wait now; those that write and those that only read are not mixed."""
        group: list[_Operation] = []
        for _ in range(len(self._waiting)):
            if group and self._waiting[0].writes != group[0].writes:
                break
            operation = self._waiting.popleft()
            if operation.result.set_running_or_notify_cancel():
                group.append(operation)
        if group:
            self._execute(group)

    def _execute(self, group: Sequence[_Operation]) -> None:
        try:
            values = self._repeat(lambda connection: [one.act(connection) for one in group], group[0].writes)
        except Exception as error:
            # Everything was undone. Unless the lock was the cause, it may have been one operation alone.
            for one in group:
                if len(group) == 1 or _is_locked(error):
                    one.result.set_exception(error)
                else:
                    self._execute([one])
        else:
            for one, value in zip(group, values, strict=True):
                one.result.set_result(value)

    def _repeat(self, act: Callable[[sqlite3.Connection], T], writes: bool) -> T:
        give_up = time.monotonic() + self.busy_timeout_s
        while True:
            try:
                return self._transact(act, writes)
            except sqlite3.Error as error:
                if not _is_locked(error):
                    self._disconnect()
                    # Exactly this class: its subclasses mean a full disk and other temporary faults.
                    if type(error) is sqlite3.DatabaseError and self.synchronous == "OFF":
                        for suffix in ("", "-wal", "-shm"):
                            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
                    raise
                if time.monotonic() >= give_up:
                    raise
            time.sleep(BUSY_RETRY_S)

    def _transact(self, act: Callable[[sqlite3.Connection], T], writes: bool) -> T:
        connection = self._opened()
        # Only a transaction that begins as a write can wait for the lock, not one that reads first.
        connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        try:
            result = act(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result

    def _opened(self) -> sqlite3.Connection:
        if self._connection is not None and self._file == self._identity():
            return self._connection
        self._disconnect()
        connection = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA synchronous={self.synchronous}")
            # An existing table needs no write, so a locked file can be opened.
            for table in self.tables:
                connection.execute(table)
        except BaseException:
            connection.close()
            raise
        self._connection, self._file = connection, self._identity()
        return connection

    def _identity(self) -> tuple[int, ...] | None:
        stat = _stat(self._names[0])
        return None if stat is None else stat[:2]

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _is_locked(error: Exception) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
