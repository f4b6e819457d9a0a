"""Streams in one SQLite file, for any number of processes of one machine.

A process notices the commits of others by ``PRAGMA data_version`` on a connection of its own: the number
changes when another connection has committed. It is read every ``WATCH_S`` in that connection's thread;
``docs/state.md`` has the cost.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiosqlite
from sqlalchemy import (
    URL,
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    delete,
    event,
    inspect,
    select,
)
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from gateway.state.errors import Conflict, StateUnavailable
from gateway.state.listeners import Listeners, Reach
from gateway.state.port import MAX_READ, Record, check_forget, check_read, check_record

WATCH_S = 0.05
POLL_S = 1.0
# Longest wait for another process's write.
BUSY_TIMEOUT_MS = 2_000
# Between two attempts to create the tables while another process creates them.
PREPARE_RETRY_S = 0.05

_METADATA = MetaData()
_RECORDS = Table(
    "state_records",
    _METADATA,
    Column("stream", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("author", String(256), nullable=False),
    Column("data", LargeBinary, nullable=False),
)
# So that a poll reads one row for each stream.
_HEADS = Table(
    "state_heads",
    _METADATA,
    Column("stream", String(64), primary_key=True),
    Column("number", Integer, nullable=False),
)
_WRITING = "sluice_writing"


class SqliteStateStore:
    """A store in the file ``path``; the folder must exist.

    Args:
        path: the file.
        unix_time: seconds since 1970.
        clock: monotonic seconds.
        poll_s: longest time between two calls of a listener.
        busy_timeout_ms: longest wait for another process's write.
    """

    def __init__(
        self,
        path: Path,
        *,
        unix_time: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = POLL_S,
        busy_timeout_ms: int = BUSY_TIMEOUT_MS,
    ) -> None:
        self._path = path
        self._unix_time = unix_time
        self._clock = clock
        self._poll_s = poll_s
        self._busy_timeout_ms = busy_timeout_ms
        url = URL.create("sqlite+aiosqlite", database=str(path))
        self._engine = create_async_engine(url, pool_size=2, max_overflow=0, pool_timeout=5)
        event.listen(self._engine.sync_engine, "connect", self._connected)
        event.listen(self._engine.sync_engine, "begin", _begin)
        self._listeners = Listeners()
        self._reach = Reach(f"sqlite:///{path}")
        self._preparing = asyncio.Lock()
        # The file that the pool's connections hold, by device and inode.
        self._file: tuple[int, int] | None = None

    @property
    def healthy(self) -> bool:
        """Whether the last operation succeeded."""
        return self._reach.healthy

    async def open(self) -> None:
        """Create the tables, if the file can be opened now."""
        try:
            await self._prepare()
        except (SQLAlchemyError, OSError) as error:
            self._reach.failed("open", _reason(error))
        else:
            self._reach.ok()

    async def close(self) -> None:
        """Close the pool."""
        await self._engine.dispose()

    async def append(self, stream: str, data: bytes, *, author: str, expected: int | None = None) -> Record:
        """Add a record; it is durable when this returns."""
        check_record(stream, data, author)
        try:
            await self._prepare()
            async with self._engine.connect() as plain:
                connection = await plain.execution_options(**{_WRITING: True})
                async with connection.begin():
                    found = (
                        await connection.scalar(select(_HEADS.c.number).where(_HEADS.c.stream == stream)) or 0
                    )
                    if expected is not None and expected != found:
                        raise Conflict(stream, expected, found)
                    record = Record(stream, found + 1, self._unix_time(), author, data)
                    head = insert(_HEADS).values(stream=stream, number=record.number)
                    head = head.on_conflict_do_update(
                        index_elements=["stream"], set_={"number": record.number}
                    )
                    await connection.execute(head)
                    await connection.execute(
                        _RECORDS.insert().values(
                            stream=stream, number=record.number, at=record.at, author=author, data=data
                        )
                    )
        except (SQLAlchemyError, OSError) as error:
            raise self._unavailable("append", error) from error
        self._reach.ok()
        self._listeners.notify(stream, record.number)
        return record

    async def read(
        self, stream: str, *, after: int = 0, limit: int = MAX_READ, newest_first: bool = False
    ) -> Sequence[Record]:
        """Records above ``after``."""
        check_read(after, limit)
        order = _RECORDS.c.number.desc() if newest_first else _RECORDS.c.number
        query = select(_RECORDS).where(_RECORDS.c.stream == stream, _RECORDS.c.number > after)
        try:
            await self._prepare()
            async with self._engine.connect() as connection:
                rows = (await connection.execute(query.order_by(order).limit(limit))).all()
        except (SQLAlchemyError, OSError) as error:
            raise self._unavailable("read", error) from error
        self._reach.ok()
        return [Record(row.stream, row.number, row.at, row.author, bytes(row.data)) for row in rows]

    async def forget(self, stream: str, up_to: int) -> None:
        """Delete records up to that number."""
        check_forget(up_to)
        old = delete(_RECORDS).where(_RECORDS.c.stream == stream, _RECORDS.c.number <= up_to)
        try:
            await self._prepare()
            async with self._engine.connect() as plain:
                connection = await plain.execution_options(**{_WRITING: True})
                async with connection.begin():
                    await connection.execute(old)
        except (SQLAlchemyError, OSError) as error:
            raise self._unavailable("forget", error) from error
        self._reach.ok()

    async def heads(self) -> Mapping[str, int]:
        """The last number of each stream."""
        try:
            await self._prepare()
            async with self._engine.connect() as connection:
                rows = (await connection.execute(select(_HEADS))).all()
        except (SQLAlchemyError, OSError) as error:
            raise self._unavailable("heads", error) from error
        self._reach.ok()
        return {row.stream: row.number for row in rows}

    def listen(self, stream: str, listener: Callable[[int], None]) -> None:
        """Call ``listener`` while ``run`` runs."""
        self._listeners.listen(stream, listener)

    async def run(self) -> None:
        """Watch the file; a file that is missing or was replaced is opened again at the next poll."""
        while True:
            try:
                await self._prepare()
                # mode=rw: watching never creates a file.
                async with aiosqlite.connect(
                    f"{self._path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None
                ) as connection:
                    await self._watch(connection)
            except (SQLAlchemyError, sqlite3.Error, OSError) as error:
                await self._reopen(_reason(error))
            await asyncio.sleep(self._poll_s)

    async def _watch(self, connection: aiosqlite.Connection) -> None:
        """Notify listeners until the file is replaced."""
        seen = polled = None
        while True:
            # The version is read before the heads: a commit between the two is noticed next time.
            [version] = await _row(connection, "PRAGMA data_version")
            due = polled is None or self._clock() - polled >= self._poll_s
            if due and self._file != await asyncio.to_thread(_identity, self._path):
                await self._reopen("the file was replaced")
                return
            if due or version != seen:
                rows = await connection.execute_fetchall("SELECT stream, number FROM state_heads")
                self._reach.ok()
                self._listeners.notify_all({row[0]: row[1] for row in rows})
                seen = version
                polled = self._clock() if due else polled
            await asyncio.sleep(WATCH_S)

    async def _reopen(self, reason: str) -> None:
        """Close the file; another one may take its place."""
        self._reach.failed("watch", reason)
        self._file = None
        await self._engine.dispose()

    async def _prepare(self) -> None:
        """Create the tables, unless they exist: then nothing is written, so a locked file can be read.

        Creating them and switching to WAL does not always wait for other processes that do the same, so it is
        repeated for as long as a write would wait.
        """
        if self._file is not None:
            return
        async with self._preparing:
            give_up = self._clock() + self._busy_timeout_ms / 1000
            while self._file is None:
                try:
                    async with self._engine.connect() as connection:
                        exist = await connection.run_sync(_tables_exist)
                    if not exist:
                        async with self._engine.connect() as plain:
                            connection = await plain.execution_options(**{_WRITING: True})
                            async with connection.begin():
                                await connection.run_sync(_METADATA.create_all)
                    self._file = await asyncio.to_thread(_identity, self._path)
                except SQLAlchemyError as error:
                    if _reason(error) != "locked" or self._clock() >= give_up:
                        raise
                    await asyncio.sleep(PREPARE_RETRY_S)

    def _unavailable(self, operation: str, error: Exception) -> StateUnavailable:
        reason = _reason(error)
        # A lock does not prevent reads: the store is reachable.
        if reason != "locked":
            self._reach.failed(operation, reason)
        return StateUnavailable(operation, reason)

    def _connected(self, connection: object, _record: object) -> None:
        cursor = connection.cursor()  # type: ignore[attr-defined]
        cursor.execute(f"PRAGMA busy_timeout={self._busy_timeout_ms}")
        cursor.execute("PRAGMA journal_mode=WAL")
        # Acknowledged records survive a loss of power; appends are rare.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()
        connection.isolation_level = None  # type: ignore[attr-defined]


def _tables_exist(connection: Connection) -> bool:
    names = inspect(connection).get_table_names()
    return all(table in names for table in _METADATA.tables)


def _begin(connection: Connection) -> None:
    """A transaction that reads first cannot wait for a lock; one that begins as a write can."""
    writing = connection.get_execution_options().get(_WRITING)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")


def _identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


async def _row(connection: aiosqlite.Connection, query: str) -> sqlite3.Row:
    [row] = await connection.execute_fetchall(query)
    return row


def _reason(error: Exception) -> str:
    """``locked``, or the class of the error; its text may contain the record."""
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, sqlite3.OperationalError) and "locked" in str(cause):
        return "locked"
    return type(cause).__name__
