"""Streams in one SQLite file, for any number of processes on one machine.

A process notices other processes' commits by ``PRAGMA data_version``, a number that changes when another
connection commits. Every ``WATCH_S`` it is read if the files have changed within ``COMMIT_S``, and after
``poll_s`` in any case.
"""

import asyncio
import contextlib
import math
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gateway.state.errors import Conflict, StateUnavailable
from gateway.state.port import MAX_READ, POLL_S, Record, StateStore, check_size
from gateway.state.sqlite_file import BUSY_TIMEOUT_S, LOCKED, SqliteFile

WATCH_S = 0.1
# A commit changes the files, waits for the disk, and can be read only then: up to seconds later.
COMMIT_S = 5.0
_TABLES = (
    "CREATE TABLE IF NOT EXISTS state_records (stream VARCHAR(64) NOT NULL, number INTEGER NOT NULL,"
    " at FLOAT NOT NULL, author VARCHAR(256) NOT NULL, data BLOB NOT NULL, PRIMARY KEY (stream, number))",
    # So that a poll reads one row for each stream.
    "CREATE TABLE IF NOT EXISTS state_heads (stream VARCHAR(64) NOT NULL, number INTEGER NOT NULL,"
    " PRIMARY KEY (stream))",
)

T = TypeVar("T")


class SqliteStateStore(StateStore):
    """A store in the file ``path``, whose folder must exist.

    ``busy_timeout_s``: longest wait for another process's write, in seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        unix_time: Callable[[], float],
        poll_s: float = POLL_S,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        super().__init__(f"sqlite:///{path}", unix_time, poll_s)
        # FULL: acknowledged records survive a power loss; appends are rare. Reads do not wait for writes.
        self._writer = SqliteFile(path, _TABLES, synchronous="FULL", busy_timeout_s=busy_timeout_s)
        self._reader = SqliteFile(path, _TABLES, synchronous="FULL", busy_timeout_s=busy_timeout_s)

    async def close(self) -> None:
        await self._writer.close()
        await self._reader.close()

    async def append(self, stream: str, data: bytes, *, author: str, expected: int | None = None) -> Record:
        """Add a record; it is durable when this returns."""
        check_size(stream, data)

        def add(connection: sqlite3.Connection) -> Record:
            head = connection.execute("SELECT number FROM state_heads WHERE stream = ?", (stream,)).fetchone()
            found = 0 if head is None else head[0]
            if expected is not None and expected != found:
                raise Conflict(stream, expected, found)
            record = Record(stream, found + 1, self._unix_time(), author, data)
            connection.execute("INSERT OR REPLACE INTO state_heads VALUES (?, ?)", (stream, record.number))
            row = (stream, record.number, record.at, author, data)
            connection.execute("INSERT INTO state_records VALUES (?, ?, ?, ?, ?)", row)
            return record

        record = await self._run(self._writer, "append", add)
        self._notify(stream, record.number)
        return record

    async def read(
        self, stream: str, *, after: int = 0, limit: int = MAX_READ, newest_first: bool = False
    ) -> Sequence[Record]:
        query = (
            "SELECT stream, number, at, author, data FROM state_records WHERE stream = ? AND number > ?"
            f" ORDER BY number {'DESC' if newest_first else 'ASC'} LIMIT ?"
        )
        rows = await self._run(
            self._reader, "read", lambda connection: _rows(connection, query, stream, after, limit)
        )
        return [Record(*row) for row in rows]

    async def forget(self, stream: str, up_to: int) -> None:
        statement = "DELETE FROM state_records WHERE stream = ? AND number <= ?"
        await self._run(
            self._writer, "forget", lambda connection: _rows(connection, statement, stream, up_to)
        )

    async def heads(self) -> Mapping[str, int]:
        return await self._run(self._reader, "heads", _heads)

    async def run(self) -> None:
        seen: tuple[object, int] | None = None
        notified_at = -math.inf
        files: Sequence[tuple[int, ...] | None] = ()
        changed_at = -math.inf
        while True:
            due = (now := time.monotonic()) - notified_at >= self._poll_s
            if files != (files := self._reader.files()):
                changed_at = now
            # A query in the thread costs ten times as much as this check, which runs 10 times a second.
            if now - changed_at > COMMIT_S and not due and seen is not None:
                await asyncio.sleep(WATCH_S)
                continue
            if due and self.refuses_writes:
                with contextlib.suppress(StateUnavailable):
                    await self._run(self._writer, "write", _write_nothing)
            with contextlib.suppress(StateUnavailable):  # `healthy` shows the failure
                found, heads = await self._run(self._reader, "watch", _look)
                if seen is None or found[0] is seen[0]:
                    if due or found != seen:
                        self._notify_all(heads)
                        notified_at = time.monotonic() if due else notified_at
                    seen = found
                    await asyncio.sleep(WATCH_S)
                    continue
                self._failed("watch", "the file was replaced")
            seen = None
            await asyncio.sleep(self._poll_s)

    async def _run(self, file: SqliteFile, operation: str, act: Callable[[sqlite3.Connection], T]) -> T:
        try:
            result = await file.run(operation, act, writes=file is self._writer)
        except StateUnavailable as error:
            # A lock does not prevent reads: the store is reachable.
            if error.reason != LOCKED or operation == "watch":
                readable = self.healthy
                self._failed(operation, error.reason)
                if file is self._writer:
                    self.refuses_writes, self.healthy = True, readable
            raise
        if file is self._writer:
            self.refuses_writes = False
        self._reached()
        return result


def _rows(connection: sqlite3.Connection, statement: str, *values: str | int) -> list[tuple[Any, ...]]:
    return connection.execute(statement, values).fetchall()


def _look(connection: sqlite3.Connection) -> tuple[tuple[object, int], Mapping[str, int]]:
    """Return the connection, its ``data_version``, which other connections' commits change, and the heads."""
    [(version,)] = _rows(connection, "PRAGMA data_version")
    return (connection, version), _heads(connection)


def _write_nothing(connection: sqlite3.Connection) -> None:
    """Write the file's first page as it is."""
    [(version,)] = _rows(connection, "PRAGMA user_version")
    connection.execute(f"PRAGMA user_version={version}")


def _heads(connection: sqlite3.Connection) -> Mapping[str, int]:
    return dict(connection.execute("SELECT stream, number FROM state_heads"))
