"""Idempotent replies in a separate SQLite file, so that they neither fill nor lock the state store's file."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

from gateway.state.idempotency import CLAIM_S, ENTRY_BYTES, KEEP_S, Claim, ReplyBounds, StoredReply
from gateway.state.sqlite_file import BUSY_TIMEOUT_S, SqliteFile

_TABLES = (
    "CREATE TABLE IF NOT EXISTS idempotent_replies (tenant VARCHAR(128) NOT NULL, key VARCHAR(256) NOT NULL,"
    " fingerprint VARCHAR(64) NOT NULL, status INTEGER NOT NULL, content_type VARCHAR(128) NOT NULL,"
    " body BLOB NOT NULL, stored_at FLOAT NOT NULL, PRIMARY KEY (tenant, key))",
    "CREATE INDEX IF NOT EXISTS ix_replies_by_age ON idempotent_replies (tenant, stored_at)",
    "CREATE INDEX IF NOT EXISTS ix_idempotent_replies_stored_at ON idempotent_replies (stored_at)",
    # The bytes of each tenant, so that a write need not sum them up.
    "CREATE TABLE IF NOT EXISTS reply_bytes (tenant VARCHAR(128) PRIMARY KEY, bytes INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS reply_claims (tenant VARCHAR(128) NOT NULL, key VARCHAR(256) NOT NULL,"
    " token TEXT NOT NULL, fingerprint TEXT NOT NULL, until FLOAT NOT NULL, PRIMARY KEY (tenant, key))",
    "CREATE TRIGGER IF NOT EXISTS reply_added AFTER INSERT ON idempotent_replies BEGIN"
    f" INSERT INTO reply_bytes VALUES (new.tenant, {ENTRY_BYTES} + LENGTH(new.body))"
    " ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes; END",
    "CREATE TRIGGER IF NOT EXISTS reply_dropped AFTER DELETE ON idempotent_replies BEGIN"
    f" UPDATE reply_bytes SET bytes = bytes - {ENTRY_BYTES} - LENGTH(old.body) WHERE tenant = old.tenant;"
    " DELETE FROM reply_bytes WHERE tenant = old.tenant AND bytes <= 0; END",
)
# The most expired replies that one write deletes.
DELETE_AT_ONCE = 100
_DROP_OLDEST = (
    "DELETE FROM idempotent_replies WHERE rowid IN"
    " (SELECT rowid FROM idempotent_replies WHERE tenant = ? ORDER BY stored_at LIMIT 1)"
)


class SqliteIdempotencyStore:
    """Implements :class:`gateway.state.idempotency.IdempotencyStore`."""

    def __init__(
        self,
        path: Path,
        *,
        unix_time: Callable[[], float],
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        bounds: ReplyBounds | None = None,
    ) -> None:
        self._file = SqliteFile(path, _TABLES, synchronous="NORMAL", busy_timeout_s=busy_timeout_s)
        self._bounds = bounds or ReplyBounds()
        self._unix_time = unix_time

    async def close(self) -> None:
        await self._file.close()

    async def get(
        self, tenant: str, key: str, claim: Claim, *, reads_only: bool = False
    ) -> tuple[str, StoredReply | None] | None:

        def find_or_claim(connection: sqlite3.Connection) -> tuple[str, int, str, bytes] | tuple[str] | None:
            now = self._unix_time()
            found: tuple[str, int, str, bytes] | None = connection.execute(
                "SELECT fingerprint, status, content_type, body FROM idempotent_replies"
                " WHERE tenant = ? AND key = ? AND stored_at >= ?",
                (tenant, key, now - KEEP_S),
            ).fetchone()
            if found is not None:
                return found
            other: tuple[str] | None = connection.execute(
                "SELECT fingerprint FROM reply_claims WHERE tenant = ? AND key = ? AND token != ?"
                " AND until BETWEEN ? AND ?",  # a later one is of a clock that was set back
                (tenant, key, claim.token, now, now + 2 * CLAIM_S),
            ).fetchone()
            if other is None and not reads_only:
                connection.execute("DELETE FROM reply_claims WHERE until < ?", (now,))
                values = (tenant, key, *claim, now + CLAIM_S)
                connection.execute("INSERT OR REPLACE INTO reply_claims VALUES (?, ?, ?, ?, ?)", values)
            return other

        row = await self._file.run("get", find_or_claim, writes=not reads_only)
        if row is None:
            return None
        return row[0], None if len(row) == 1 else StoredReply(*row[1:])

    async def renew(self, tenant: str, key: str, claim: Claim) -> None:
        await self._end_at(tenant, key, claim, self._unix_time() + CLAIM_S)

    async def release(self, tenant: str, key: str, claim: Claim) -> None:
        await self._end_at(tenant, key, claim, 0.0)

    async def _end_at(self, tenant: str, key: str, claim: Claim, until: float) -> None:
        change = "UPDATE reply_claims SET until = ? WHERE tenant = ? AND key = ? AND token = ?"
        values = until, tenant, key, claim.token
        await self._file.run("renew", lambda connection: connection.execute(change, values))

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> bool:
        if reply.size > self._bounds.reply:
            return False
        now = self._unix_time()

        def store(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM idempotent_replies WHERE tenant = ? AND key = ? AND stored_at < ?",
                (tenant, key, now - KEEP_S),
            )
            connection.execute(
                "INSERT OR IGNORE INTO idempotent_replies VALUES (?, ?, ?, ?, ?, ?, ?)",
                (tenant, key, fingerprint, reply.status, reply.content_type, reply.body, now),
            )
            connection.execute(
                "DELETE FROM idempotent_replies WHERE rowid IN (SELECT rowid FROM idempotent_replies"
                " WHERE stored_at < ? ORDER BY stored_at LIMIT ?)",
                (now - KEEP_S, DELETE_AT_ONCE),
            )
            while _bytes(connection, "tenant = ?", tenant) > self._bounds.tenant:
                connection.execute(_DROP_OLDEST, (tenant,))
            while _bytes(connection, "TRUE") > self._bounds.all:
                [most] = connection.execute(
                    "SELECT tenant FROM reply_bytes ORDER BY bytes DESC LIMIT 1"
                ).fetchone()
                connection.execute(_DROP_OLDEST, (most,))

        await self._file.run("put", store)
        return True


def _bytes(connection: sqlite3.Connection, which: str, *values: str) -> int:
    query = f"SELECT COALESCE(SUM(bytes), 0) FROM reply_bytes WHERE {which}"
    found: int = connection.execute(query, values).fetchone()[0]
    return found
