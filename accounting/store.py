"""The ledger's database: creates the tables, writes batches, reads rows."""

import asyncio
import contextlib
import os
import sqlite3
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Executable, RowMapping, Select, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    IntegrityError,
    InvalidRequestError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
    StatementError,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random

from accounting.day_sums import sum_a_day
from accounting.errors import LedgerUnavailable
from accounting.events import error_kind
from accounting.store_schema import bring_up
from accounting.tables import RowInsert, V, counts_upsert, value_of
from accounting.values import EngineCount, UsageRow

W = TypeVar("W")
ALLOWED_DRIVERS = ("sqlite+aiosqlite", "postgresql+asyncpg")
# The parameters of a PostgreSQL url: those of asyncpg and SQLAlchemy that take text, or convert it.
_CONNECTION = ("host", "port", "user", "password", "passfile", "database", "service", "servicefile", "ssl")
POSTGRES_PARAMETERS = frozenset(
    (*_CONNECTION, "direct_tls", "target_session_attrs", "krbsrvname", "prepared_statement_cache_size")
)
# How long SQLite itself waits for another process's lock, in its own thread. Short, because a call in
# that thread cannot be interrupted and closing waits for it; longer locks are handled by retries.
BUSY_TIMEOUT_MS = 500
PREPARE_S = 30.0  # longest wait for another store or process that migrates the same file
SUM_S = 30.0  # longest time to sum up one day; meanwhile no row is written
POOL_CONNECTIONS = 4  # enough for the writer and a few reports

# Without an adapter sqlite3 looks in vain for two methods of each None, which some ten values of a row are.
# This one gives None, and is no function of Python.
_NONE: dict[None, None] = {}
sqlite3.register_adapter(type(None), _NONE.get)


class GenerationStore:
    """The table ``generations`` of a database url."""

    def __init__(self, url: str, connections: int = POOL_CONNECTIONS) -> None:
        self._url = url
        self._connections = connections
        self._engine: AsyncEngine | None = None
        self._row_insert: RowInsert | None = None
        self._prepared = False
        self._preparing = asyncio.Lock()
        # Whether the schema has been brought to this version at least once since the start.
        self.prepared = False
        # Whether all callers share one connection, so that only one may use it at a time.
        self.in_memory = False

    def connect(self) -> None:
        """Check the url and create the engine; connects to no database. Raises LedgerUnavailable."""
        allowed = " or ".join(f"{driver}://…" for driver in ALLOWED_DRIVERS)
        try:
            url = make_url(self._url)
        except (ArgumentError, ValueError) as error:
            # The text is not shown: an invalid url may contain a password anywhere.
            raise LedgerUnavailable(f"ledger.url is not a database url; allowed: {allowed}") from error
        if url.drivername not in ALLOWED_DRIVERS:
            raise LedgerUnavailable(f"ledger.url is of {url.drivername!r}; allowed: {allowed}")
        try:
            self._engine = make_engine(url, self._connections)
        except (ArgumentError, ImportError, InvalidRequestError, NoSuchModuleError) as error:
            raise LedgerUnavailable(f"ledger.url: {url.drivername!r} is not installed") from error
        unknown = sorted(url.query.keys() - POSTGRES_PARAMETERS)
        if unknown and url.get_backend_name() == "postgresql":
            raise LedgerUnavailable(
                f"ledger.url: the driver has no parameter {unknown[0][:40]!r}; allowed: "
                f"{', '.join(sorted(POSTGRES_PARAMETERS))}; libpq's sslmode=require is ssl=require here"
            )
        self.in_memory = _in_memory(url)

    async def prepare(self) -> None:
        """Create the tables, or migrate them to this version."""
        # Two calls at once would block each other with their locks.
        async with self._preparing:
            if self._prepared:
                return
            engine = self._opened()
            try:
                async for attempt in AsyncRetrying(
                    retry=retry_if_exception(_is_locked),
                    stop=stop_after_delay(PREPARE_S),
                    wait=wait_random(0.02, 0.1),
                    reraise=True,
                ):
                    with attempt:
                        await self._bring_up(engine)
            except Exception:
                await self._forget_connections()
                raise
            self._prepared = self.prepared = True

    async def _bring_up(self, engine: AsyncEngine) -> None:
        if engine.dialect.name == "sqlite" and not self.in_memory:
            _repair_companions(Path(engine.url.database or ""))
            # WAL lets reports read during writes. The mode is stored in the file.
            async with engine.connect() as connection:
                await connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        await bring_up(engine)

    async def write(self, batch: Sequence[UsageRow]) -> Sequence[UsageRow]:
        """Make ``batch`` durable in one transaction; existing rows stay unchanged. An empty batch only
        creates the tables.

        Returns the rows whose values the database refuses; the others are durable. After an error the batch
        must be written again.
        """
        await self.prepare()
        if not batch or await self._insert(batch):
            return ()
        return [row for row in batch if not await self._insert((row,))]

    async def select(self, query: Select[Any]) -> list[dict[str, Any]]:
        """The result of a query. Raises LedgerUnavailable."""
        try:
            async with self._opened().connect() as connection:
                found = await connection.execute(query)
                # SQLAlchemy's names are a subclass of str that not every consumer accepts.
                names = [str(name) for name in found.keys()]  # noqa: SIM118 - no mapping
                return [dict(zip(names, line, strict=True)) for line in found]
        except (SQLAlchemyError, OSError) as error:
            raise unavailable("the ledger cannot be read now", error) from error

    async def write_counts(self, counts: Sequence[EngineCount]) -> None:
        """Write the engines' counts. Raises LedgerUnavailable."""
        async with self.transaction("the ledger cannot be written now") as connection:
            await connection.execute(counts_upsert(connection.dialect, counts))

    async def sum_a_day(self, before: int) -> bool:
        """Run :func:`accounting.day_sums.sum_a_day` in a transaction. Raises LedgerUnavailable."""
        async with self.transaction("the ledger's days cannot be summed up now", SUM_S) as connection:
            return await sum_a_day(connection, before)

    @contextlib.asynccontextmanager
    async def transaction(
        self, failure: str, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncConnection]:
        """A transaction on prepared tables, of at most ``timeout_s``.

        Raises LedgerUnavailable, whose message begins with ``failure``.
        """
        if self._engine is None:
            self.connect()
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                await self.prepare()
                async with self._opened().begin() as connection:
                    yield connection
        except (SQLAlchemyError, OSError) as error:
            if limit.expired():
                raise LedgerUnavailable(f"{failure} (no answer within {timeout_s:g} s)") from error
            await self._forget_connections()
            raise unavailable(failure, error) from error

    async def close(self, timeout_s: float | None) -> None:
        """Close all connections, waiting at most ``timeout_s`` seconds for calls in progress."""
        engine, self._engine = self._engine, None
        if engine is not None:
            async with asyncio.timeout(timeout_s):
                await engine.dispose()

    async def _insert(self, rows: Sequence[UsageRow]) -> bool:
        """Insert rows in one transaction; ``False`` when the database refuses the values of one of them."""
        try:
            async with self._opened().begin() as connection:
                await self.insert(rows, connection)
        except Exception as error:
            if not is_the_rows_fault(error):
                await self._forget_connections()
                raise
            return False
        return True

    async def insert(self, rows: Sequence[UsageRow], connection: AsyncConnection) -> None:
        """Insert rows in the connection's transaction; existing rows stay unchanged."""
        if self._row_insert is None:
            self._row_insert = RowInsert(connection.dialect)
        insert = self._row_insert
        await connection.exec_driver_sql(insert.sql, [insert.values(row) for row in rows])

    async def _forget_connections(self) -> None:
        """Connect again next time: the file may have been replaced, the server may have lost its tables."""
        if self.in_memory:
            return
        self._prepared = False
        await self._opened().dispose()

    def _opened(self) -> AsyncEngine:
        if self._engine is None:
            raise LedgerUnavailable("the ledger is not open")
        return self._engine


class FurtherTables:
    """Base of stores for other tables in the ledger's database. Methods raise LedgerUnavailable, whose
    message begins with ``failure``; ``timeout_s`` is their longest wait for the database.
    """

    def __init__(
        self, url: str, failure: str, *, timeout_s: float, connections: int = POOL_CONNECTIONS
    ) -> None:
        self._store = GenerationStore(url, connections)
        self._transaction = partial(self._store.transaction, failure, timeout_s)
        self._tries = max(1, int(timeout_s * 1000) // BUSY_TIMEOUT_MS)

    async def close(self) -> None:
        await self._store.close(None)

    async def _change(self, change: Executable) -> bool:
        """Execute a statement; returns whether it has changed a row."""
        return (await self._written(lambda connection: connection.execute(change))).rowcount > 0

    async def _written(self, write: Callable[[AsyncConnection], Awaitable[W]]) -> W:
        """Write in a transaction, again if SQLite has waited for another connection's lock in vain."""
        for left in reversed(range(self._tries)):
            try:
                async with self._transaction() as connection:
                    return await write(connection)
            except LedgerUnavailable as error:
                if not left or error.__cause__ is None or not _is_locked(error.__cause__):
                    raise
        raise AssertionError("the last try returns or raises")

    async def _rows(self, query: Executable) -> Sequence[RowMapping]:
        async with self._transaction() as connection:
            return (await connection.execute(query)).mappings().all()

    async def _all(self, query: Executable, kind: type[V]) -> list[V]:
        return [value_of(one, kind) for one in await self._rows(query)]

    async def _first(self, query: Select[Any], kind: type[V]) -> V | None:
        found = await self._all(query.limit(1), kind)
        return found[0] if found else None


def _is_locked(error: BaseException) -> bool:
    """Whether SQLite gave up, because another connection held the lock for too long."""
    return isinstance(error, OperationalError) and "database is locked" in str(error.orig)


def _in_memory(url: URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def make_engine(url: URL, connections: int) -> AsyncEngine:
    """A SQLAlchemy engine for the ledger's url, with at most this many ``connections``.

    SQLite in memory has one. The file of a closed connection stays open, for the next one, while another
    connection of this process has the same database open, since closing a file ends the process's locks. So
    the bound is that of open files too.
    """
    if url.get_backend_name() != "sqlite":
        return create_async_engine(url, pool_size=connections, max_overflow=0, pool_pre_ping=True)
    bounds = {} if _in_memory(url) else {"pool_size": connections, "max_overflow": 0}
    engine = create_async_engine(url, **bounds)

    def set_up(connection: DBAPIConnection, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        # A row is a bill, so it must survive a power cut; a batch needs one sync for all its rows.
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.close()

    def roll_back(connection: DBAPIConnection, _: object, error: BaseException | None) -> None:
        # A cancelled call leaves its thread in the middle of a transaction. Closing the connection does not
        # end it: SQLite keeps a closed connection, with its locks, while a cursor of it is referenced. A
        # connection that cannot roll back is closed next.
        if error is not None:
            with contextlib.suppress(sqlite3.Error, ValueError):
                connection.rollback()

    event.listen(engine.sync_engine, "connect", set_up)
    event.listen(engine.sync_engine, "invalidate", roll_back)
    return engine


def _repair_companions(database: Path) -> None:
    """Give the -wal and -shm files the permissions of the database. SQLite copies these when it creates them:
    if the database was read-only then, these files would keep it read-only afterwards.
    """
    if not os.access(database, os.W_OK):
        return
    for suffix in ("-wal", "-shm"):
        companion = database.with_name(database.name + suffix)
        if companion.exists() and not os.access(companion, os.W_OK):
            companion.chmod(stat.S_IMODE(database.stat().st_mode))


def unavailable(what: str, error: Exception) -> LedgerUnavailable:
    """An error with the message ``what`` and the kind of the driver's error."""
    return LedgerUnavailable(f"{what} ({error_kind(error)})")


def is_the_rows_fault(error: Exception) -> bool:
    """Whether writing the same row again would fail in any state of the database."""
    if isinstance(error, IntegrityError | DataError):
        return True
    cause: object = error.orig if isinstance(error, StatementError) else error
    # PostgreSQL's SQLSTATE classes 22 (value) and 23 (constraint), whatever the driver's exception class.
    if str(getattr(cause, "sqlstate", ""))[:2] in ("22", "23"):
        return True
    # Values that a driver cannot bind: an integer over 64 bits, a text that is not Unicode.
    return isinstance(cause, OverflowError | UnicodeError)
