"""Limits of keys in a SQLite file, for any number of processes of one machine.

The file is next to the state store's and separate from it: its counts are worthless after a day, need no
fsync, and would wake the processes that watch the other file. Each operation is one short transaction in a
thread.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from accounting.keys import KeyLimits
from accounting.quotas import KeyUsage, QuotaRequest, QuotaVerdict, Settlement
from gateway.state.errors import StateUnavailable
from gateway.state.limits import KEPT_S, LEASE_S

# Longest wait for another process's write; below the time that a request waits for its decision.
BUSY_TIMEOUT_S = 0.4
# Between two attempts. SQLite's own waits grow to 100 ms, and a busier process would always be first.
BUSY_RETRY_S = 0.0005
# Most operations that wait for the thread.
MAX_WAITING = 1_024
_TABLES = (
    "CREATE TABLE IF NOT EXISTS limit_tallies (key_id TEXT PRIMARY KEY, kept BLOB NOT NULL, at REAL NOT NULL)"
    " WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS limit_holders (holder TEXT PRIMARY KEY, lease REAL NOT NULL) WITHOUT ROWID",
)

T = TypeVar("T")


def limits_file(path: Path) -> Path:
    """The file next to the state store's ``path``."""
    return path.with_name(f"{path.name}.limits")


class SqliteLimitStore:
    """Implements :class:`gateway.state.limits.LimitStore`; a damaged file is deleted.

    Args:
        path: the file; its folder must exist.
        unix_time: seconds since 1970; all processes of a machine share it.
    """

    def __init__(self, path: Path, *, unix_time: Callable[[], float]) -> None:
        self._path = path
        self._unix_time = unix_time
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="limits")
        self._waiting = 0
        self._counting = threading.Lock()
        # Used by the thread only.
        self._open_connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    async def close(self) -> None:
        """Close the connection and end the thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    async def take(
        self, key_id: str, limits: KeyLimits, ask: QuotaRequest, *, fresh: bool
    ) -> QuotaVerdict | None:
        """Decide on a request."""

        def decide(connection: sqlite3.Connection, now: float) -> QuotaVerdict | None:
            leases = _Leases(connection, now)
            if ask.tokens and ask.hold is not None:
                if not fresh and not leases(ask.hold.holder):
                    return None
                _lease(connection, ask.hold.holder, now)
            tally = _load(connection, key_id, limits)
            verdict = tally.take(ask, now, alive=leases)
            if verdict.excess is None and (ask.requests or ask.tokens):
                _save(connection, key_id, tally, now)
            return verdict

        return await self._do("take", decide)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Replace the held tokens by those used."""

        def replace(connection: sqlite3.Connection, now: float) -> None:
            for one in settlements:
                tally = _load(connection, one.key_id, one.limits)
                tally.settle(one, now)
                _save(connection, one.key_id, tally, now)

        await self._do("settle", replace)

    async def renew(self, holder: str) -> bool:
        """Renew the lease; also deletes old holders and accounts."""

        def keep(connection: sqlite3.Connection, now: float) -> bool:
            connection.execute("DELETE FROM limit_holders WHERE lease < ?", (now - LEASE_S,))
            connection.execute("DELETE FROM limit_tallies WHERE at < ?", (now - KEPT_S,))
            if not _Leases(connection, now)(holder):
                return False
            _lease(connection, holder, now)
            return True

        return await self._do("renew", keep)

    async def _do(self, operation: str, act: Callable[[sqlite3.Connection, float], T]) -> T:
        if self._waiting >= MAX_WAITING:
            raise StateUnavailable(operation, f"{MAX_WAITING} operations wait")

        def transact() -> T:
            try:
                connection = self._connected()
                _begin(connection)
                try:
                    done = act(connection, self._unix_time())
                except BaseException:
                    connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
            except sqlite3.DatabaseError as error:
                # This very class: its subclasses stand for a lock or a full disk.
                if type(error) is sqlite3.DatabaseError:
                    self._delete()
                raise
            return done

        self._count(1)
        doing = self._thread.submit(transact)
        # Counted until the thread is done, also when the caller was cancelled.
        doing.add_done_callback(lambda _: self._count(-1))
        try:
            return await asyncio.wrap_future(doing)
        except (sqlite3.Error, OSError) as error:
            raise StateUnavailable(operation, type(error).__name__) from error

    def _count(self, by: int) -> None:
        with self._counting:
            self._waiting += by

    def _connected(self) -> sqlite3.Connection:
        """The connection; a file that was removed or replaced is opened again."""
        if self._open_connection is not None and self._file == _identity(self._path):
            return self._open_connection
        self._disconnect()
        connection = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            # No decision waits for a disk. A file damaged by a loss of power is created again.
            connection.execute("PRAGMA synchronous=OFF")
            for table in _TABLES:
                connection.execute(table)
            connection.execute("PRAGMA busy_timeout=0")
        except BaseException:
            connection.close()
            raise
        self._open_connection, self._file = connection, _identity(self._path)
        return connection

    def _delete(self) -> None:
        """Delete a damaged file; the next operation creates another one."""
        self._disconnect()
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def _disconnect(self) -> None:
        if self._open_connection is not None:
            self._open_connection.close()
            self._open_connection = None


def _begin(connection: sqlite3.Connection) -> None:
    """Begin to write."""
    give_up = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= give_up:
                raise
        time.sleep(BUSY_RETRY_S)


class _Leases:
    """Tells whether a holder's lease is valid; each holder is looked up once."""

    def __init__(self, connection: sqlite3.Connection, now: float) -> None:
        self._connection = connection
        self._now = now
        self._known: dict[str, bool] = {}

    def __call__(self, holder: str) -> bool:
        known = self._known.get(holder)
        if known is None:
            query = "SELECT 1 FROM limit_holders WHERE holder = ? AND lease >= ?"
            with closing(self._connection.execute(query, (holder, self._now))) as found:
                known = self._known[holder] = found.fetchone() is not None
        return known


def _lease(connection: sqlite3.Connection, holder: str, now: float) -> None:
    connection.execute("INSERT OR REPLACE INTO limit_holders VALUES (?, ?)", (holder, now + LEASE_S))


def _load(connection: sqlite3.Connection, key_id: str, limits: KeyLimits) -> KeyUsage:
    with closing(connection.execute("SELECT kept FROM limit_tallies WHERE key_id = ?", (key_id,))) as found:
        row = found.fetchone()
    return KeyUsage(limits, None if row is None else row[0])


def _save(connection: sqlite3.Connection, key_id: str, tally: KeyUsage, now: float) -> None:
    connection.execute("INSERT OR REPLACE INTO limit_tallies VALUES (?, ?, ?)", (key_id, tally.encode(), now))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino
