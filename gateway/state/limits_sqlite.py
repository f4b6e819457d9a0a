"""Limits of keys in a SQLite file, for any number of processes on one machine.

The file is not the state store's: counts need no fsync, and would wake the processes that watch that file.
"""

import sqlite3
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from accounting.keys import Budget, KeyLimits
from accounting.quotas import KeyUsage, QuotaRequest, QuotaVerdict, Settlement
from gateway.state.limits import KEPT_S, LEASE_S
from gateway.state.sqlite_file import SqliteFile

# Longest wait for another process's write, in seconds; less than a request waits for its decision.
BUSY_TIMEOUT_S = 0.4
_TABLES = (
    "CREATE TABLE IF NOT EXISTS limit_tallies (key_id TEXT PRIMARY KEY, kept BLOB NOT NULL, at REAL NOT NULL)"
    " WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS limit_holders (holder TEXT PRIMARY KEY, lease REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS limit_batches (sender TEXT PRIMARY KEY, number INTEGER NOT NULL,"
    " at REAL NOT NULL) WITHOUT ROWID",
)


class SqliteLimitStore:
    """Implements :class:`gateway.state.limits.LimitStore`; all processes must use the same ``unix_time``."""

    def __init__(self, path: Path, *, unix_time: Callable[[], float]) -> None:
        # Decisions do not wait for the disk. A file that a power loss damaged is created again.
        self._file = SqliteFile(path, _TABLES, synchronous="OFF", busy_timeout_s=BUSY_TIMEOUT_S)
        self._unix_time = unix_time

    async def close(self) -> None:
        await self._file.close()

    async def take(
        self, key_id: str, limits: KeyLimits | Budget, ask: QuotaRequest, *, fresh: bool
    ) -> QuotaVerdict | None:

        def decide(connection: sqlite3.Connection) -> QuotaVerdict | None:
            now = self._unix_time()
            leases = _leases(connection, now)
            if ask.tokens and ask.hold is not None:
                if not fresh and not leases(ask.hold.holder):
                    return None
                _lease(connection, ask.hold.holder, now)
            tally = _load(connection, key_id, limits)
            verdict = tally.take(ask, now, alive=leases)
            if verdict.excess is None and (ask.requests or ask.tokens):
                _save(connection, key_id, tally, now)
            return verdict

        return await self._file.run("take", decide)

    async def settle(self, sender: str, number: int, settlements: Sequence[Settlement]) -> None:

        def replace(connection: sqlite3.Connection) -> None:
            now = self._unix_time()
            query = "SELECT 1 FROM limit_batches WHERE sender = ? AND number >= ?"
            if connection.execute(query, (sender, number)).fetchone() is not None:
                return
            connection.execute("INSERT OR REPLACE INTO limit_batches VALUES (?, ?, ?)", (sender, number, now))
            for one in settlements:
                tally = _load(connection, one.key_id, one.limits)
                tally.settle(one, now)
                _save(connection, one.key_id, tally, now)

        await self._file.run("settle", replace)

    async def renew(self, holder: str) -> bool:
        """Renew the lease, and delete old holders and accounts."""

        def keep(connection: sqlite3.Connection) -> bool:
            now = self._unix_time()
            connection.execute("DELETE FROM limit_holders WHERE lease < ?", (now - LEASE_S,))
            for table in ("limit_tallies", "limit_batches"):
                connection.execute(f"DELETE FROM {table} WHERE at < ?", (now - KEPT_S,))
            if not _leases(connection, now)(holder):
                return False
            _lease(connection, holder, now)
            return True

        return await self._file.run("renew", keep)


def _leases(connection: sqlite3.Connection, now: float) -> Callable[[str], bool]:
    """Return a function that says whether a holder's lease is valid; it looks each holder up once."""

    @cache
    def is_valid(holder: str) -> bool:
        query = "SELECT lease FROM limit_holders WHERE holder = ? AND lease >= ?"
        found = connection.execute(query, (holder, now)).fetchone()
        if found is not None and found[0] > now + LEASE_S:  # the clock was set back
            _lease(connection, holder, now)
        return found is not None

    return is_valid


def _lease(connection: sqlite3.Connection, holder: str, now: float) -> None:
    connection.execute("INSERT OR REPLACE INTO limit_holders VALUES (?, ?)", (holder, now + LEASE_S))


def _load(connection: sqlite3.Connection, key_id: str, limits: KeyLimits | Budget) -> KeyUsage:
    row = connection.execute("SELECT kept FROM limit_tallies WHERE key_id = ?", (key_id,)).fetchone()
    return KeyUsage(limits, None if row is None else row[0])


def _save(connection: sqlite3.Connection, key_id: str, tally: KeyUsage, now: float) -> None:
    connection.execute("INSERT OR REPLACE INTO limit_tallies VALUES (?, ?, ?)", (key_id, tally.encode(), now))
