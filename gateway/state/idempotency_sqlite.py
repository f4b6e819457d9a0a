"""Idempotent replies in the SQLite file of the state store."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

from gateway.state.idempotency import KEEP_S, MAX_REPLIES, StoredReply
from gateway.state.sqlite_file import BUSY_TIMEOUT_S, SqliteFile

_TABLES = (
    "CREATE TABLE IF NOT EXISTS idempotent_replies (tenant VARCHAR(128) NOT NULL, key VARCHAR(256) NOT NULL,"
    " fingerprint VARCHAR(64) NOT NULL, status INTEGER NOT NULL, content_type VARCHAR(128) NOT NULL,"
    " body BLOB NOT NULL, stored_at FLOAT NOT NULL, PRIMARY KEY (tenant, key))",
    "CREATE INDEX IF NOT EXISTS ix_idempotent_replies_stored_at ON idempotent_replies (stored_at)",
)
# How often old replies are deleted: at every hundredth write.
DELETE_EVERY = 100


class SqliteIdempotencyStore:
    """Implements :class:`gateway.state.idempotency.IdempotencyStore`."""

    def __init__(
        self,
        path: Path,
        *,
        unix_time: Callable[[], float],
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        max_replies: int = MAX_REPLIES,
    ) -> None:
        self._file = SqliteFile(path, _TABLES, synchronous="NORMAL", busy_timeout_s=busy_timeout_s)
        self._max_replies = max_replies
        self._unix_time = unix_time
        self._puts = 0

    async def close(self) -> None:
        """Close the file."""
        await self._file.close()

    async def get(self, tenant: str, key: str) -> tuple[str, StoredReply] | None:
        """The body's fingerprint and the reply, when stored within the last 24 hours."""

        def find(connection: sqlite3.Connection) -> tuple[str, int, str, bytes] | None:
            found: tuple[str, int, str, bytes] | None = connection.execute(
                "SELECT fingerprint, status, content_type, body FROM idempotent_replies"
                " WHERE tenant = ? AND key = ? AND stored_at >= ?",
                (tenant, key, self._unix_time() - KEEP_S),
            ).fetchone()
            return found

        row = await self._file.run("get", find, writes=False)
        return None if row is None else (row[0], StoredReply(*row[1:]))

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> None:
        """Store a reply; the first one under a key stays until it has expired."""
        now = self._unix_time()
        self._puts += 1
        deletes = self._puts % DELETE_EVERY == 1

        def store(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM idempotent_replies WHERE tenant = ? AND key = ? AND stored_at < ?",
                (tenant, key, now - KEEP_S),
            )
            connection.execute(
                "INSERT OR IGNORE INTO idempotent_replies VALUES (?, ?, ?, ?, ?, ?, ?)",
                (tenant, key, fingerprint, reply.status, reply.content_type, reply.body, now),
            )
            if deletes:
                connection.execute("DELETE FROM idempotent_replies WHERE stored_at < ?", (now - KEEP_S,))
                connection.execute(
                    "DELETE FROM idempotent_replies WHERE rowid IN (SELECT rowid FROM idempotent_replies"
                    " ORDER BY stored_at DESC LIMIT -1 OFFSET ?)",
                    (self._max_replies,),
                )

        await self._file.run("put", store)
