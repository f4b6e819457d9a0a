"""Idempotent replies in the SQLite file of the state store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog
from sqlalchemy import (
    URL,
    Column,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    delete,
    event,
    func,
    select,
)
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from gateway.state.idempotency import KEEP_S, MAX_REPLIES, StoredReply

BUSY_TIMEOUT_MS = 2_000

_METADATA = MetaData()
_REPLIES = Table(
    "idempotent_replies",
    _METADATA,
    Column("tenant", String(128), primary_key=True),
    Column("key", String(256), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("status", Integer, nullable=False),
    Column("content_type", String(128), nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("stored_at", Float, nullable=False, index=True),
)


class SqliteIdempotencyStore:
    """Stores replies for 24 hours in SQLite.

    An operation that fails turns ``healthy`` false and raises SQLAlchemyError.

    Args:
        path: the file.
        unix_time: seconds since 1970.
        busy_timeout_ms: longest wait for another process that writes.
        max_replies: the oldest beyond it are dropped, checked at every hundredth write.
    """

    def __init__(
        self,
        path: Path,
        *,
        unix_time: Callable[[], float],
        busy_timeout_ms: int = BUSY_TIMEOUT_MS,
        max_replies: int = MAX_REPLIES,
    ) -> None:
        url = URL.create("sqlite+aiosqlite", database=str(path))
        self._engine = create_async_engine(url, pool_size=2, max_overflow=0, pool_timeout=5)
        self._busy_timeout_ms = busy_timeout_ms
        self._max_replies = max_replies
        event.listen(self._engine.sync_engine, "connect", self._connected)
        self._unix_time = unix_time
        self._log = structlog.get_logger("state")
        self._puts = 0
        self.healthy = True

    async def open(self) -> None:
        """Create the table; a file that cannot be reached is tried again with each request."""
        try:
            async with self._engine.begin() as connection:
                await connection.run_sync(_METADATA.create_all)
        except SQLAlchemyError as error:
            self._failed("open", error)

    async def close(self) -> None:
        """Close the pool."""
        await self._engine.dispose()

    async def get(self, tenant: str, key: str) -> tuple[str, StoredReply] | None:
        """The body's fingerprint and the reply, when stored within the last 24 hours."""
        fresh = _REPLIES.c.stored_at >= self._unix_time() - KEEP_S
        query = select(_REPLIES).where(_REPLIES.c.tenant == tenant, _REPLIES.c.key == key, fresh)
        try:
            async with self._engine.connect() as connection:
                row = (await connection.execute(query)).one_or_none()
        except SQLAlchemyError as error:
            self._failed("get", error)
            raise
        self.healthy = True
        if row is None:
            return None
        return row.fingerprint, StoredReply(row.status, row.content_type, row.body)

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> None:
        """Store a reply; the first one under a key stays until it has expired."""
        now = self._unix_time()
        values = {
            "fingerprint": fingerprint,
            "status": reply.status,
            "content_type": reply.content_type,
            "body": reply.body,
            "stored_at": now,
        }
        statement = insert(_REPLIES).values(tenant=tenant, key=key, **values)
        statement = statement.on_conflict_do_update(
            index_elements=["tenant", "key"], set_=values, where=_REPLIES.c.stored_at < now - KEEP_S
        )
        self._puts += 1
        try:
            async with self._engine.begin() as connection:
                await connection.execute(statement)
                if self._puts % 100 == 1:
                    await connection.execute(delete(_REPLIES).where(_REPLIES.c.stored_at < now - KEEP_S))
                    excess = (
                        await connection.execute(select(func.count()).select_from(_REPLIES))
                    ).scalar_one()
                    if excess > self._max_replies:
                        oldest = select(_REPLIES.c.stored_at).order_by(_REPLIES.c.stored_at)
                        limit = oldest.offset(excess - self._max_replies).limit(1).scalar_subquery()
                        await connection.execute(delete(_REPLIES).where(_REPLIES.c.stored_at < limit))
        except SQLAlchemyError as error:
            self._failed("put", error)
            raise
        self.healthy = True

    def _failed(self, what: str, error: SQLAlchemyError) -> None:
        self.healthy = False
        self._log.warning("state store failed", operation=what, error=type(error).__name__)

    def _connected(self, connection: object, _record: object) -> None:
        cursor = connection.cursor()  # type: ignore[attr-defined]
        cursor.execute(f"PRAGMA busy_timeout={self._busy_timeout_ms}")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.close()
