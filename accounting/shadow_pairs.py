"""The table ``shadow_pairs`` in the ledger's database."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from sqlalchemy import Column, Double, Index, RowMapping, Table, Text, delete, event, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, InvalidRequestError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from accounting.errors import LedgerUnavailable
from accounting.shadow_values import ShadowPair, ShadowSide
from accounting.store_schema import bring_up
from accounting.tables import metadata

shadow_pairs = Table(
    "shadow_pairs",
    metadata,
    Column("pair_id", Text, primary_key=True),
    Column("generation_id", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("route", Text, nullable=False),
    Column("prompt_version", Text),
    Column("adapter_id", Text),
    Column("intent", Text),
    Column("likeness", Double),
    Column("meaning", Double),
    Column("judged", Text),
    Column("primary_side", Text, nullable=False),
    Column("shadow_side", Text, nullable=False),
    Index("ix_shadow_pairs_at", "at"),
)

# As the ledger's: SQLite waits for another writer in a thread that cannot be interrupted.
BUSY_TIMEOUT_MS = 500
# The writer, and a report beside it.
POOL_CONNECTIONS = 2


class ShadowPairStore:
    """Keeps pairs, and forgets them: the oldest beyond ``keep_pairs``, and those older than ``keep_s``.

    Args:
        url: the ledger's.
        keep_pairs: most pairs.
        keep_s: seconds.
    """

    def __init__(self, url: str, *, keep_pairs: int, keep_s: float) -> None:
        self._url = url
        self._keep_pairs = keep_pairs
        self._keep_s = keep_s
        self._engine: AsyncEngine | None = None
        self._prepared = False

    async def write(self, pairs: Sequence[ShadowPair], *, now: float) -> None:
        """Make pairs durable and forget old ones, in one transaction. Raises LedgerUnavailable."""
        rows = [_columns(pair) for pair in pairs]
        try:
            async with await self._begin() as connection:
                if rows:
                    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
                    insert = make(shadow_pairs).on_conflict_do_nothing(index_elements=["pair_id"])
                    await connection.execute(insert, rows)
                await connection.execute(delete(shadow_pairs).where(shadow_pairs.c.at < now - self._keep_s))
                kept = (
                    select(shadow_pairs.c.at)
                    .order_by(shadow_pairs.c.at.desc())
                    .offset(self._keep_pairs)
                    .limit(1)
                )
                oldest = (await connection.execute(kept)).scalar()
                if oldest is not None:
                    await connection.execute(delete(shadow_pairs).where(shadow_pairs.c.at <= oldest))
        except (SQLAlchemyError, OSError) as error:
            await self._forget_connections()
            raise _unavailable(error) from error

    async def newest(
        self, limit: int, *, route: str | None = None, since: float | None = None
    ) -> list[ShadowPair]:
        """Pairs, newest first. Raises LedgerUnavailable."""
        query = select(shadow_pairs).order_by(shadow_pairs.c.at.desc()).limit(limit)
        if route is not None:
            query = query.where(shadow_pairs.c.route == route)
        if since is not None:
            query = query.where(shadow_pairs.c.at >= since)
        try:
            async with await self._begin() as connection:
                found = (await connection.execute(query)).mappings().all()
        except (SQLAlchemyError, OSError) as error:
            await self._forget_connections()
            raise _unavailable(error) from error
        return [_pair(columns) for columns in found]

    async def close(self) -> None:
        """Let the database go."""
        engine, self._engine, self._prepared = self._engine, None, False
        if engine is not None:
            await engine.dispose()

    async def _begin(self) -> contextlib.AbstractAsyncContextManager[AsyncConnection]:
        if self._engine is None:
            self._engine = _engine(self._url)
        if not self._prepared:
            await bring_up(self._engine)
            self._prepared = True
        return self._engine.begin()

    async def _forget_connections(self) -> None:
        """Begin anew next time: a file may be another one by then, a server may have lost its tables."""
        self._prepared = False
        if self._engine is not None:
            await self._engine.dispose()


def _engine(url: str) -> AsyncEngine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            return create_async_engine(parsed, pool_size=POOL_CONNECTIONS, max_overflow=0, pool_pre_ping=True)
        engine = create_async_engine(parsed)
    except (ArgumentError, ImportError, InvalidRequestError, NoSuchModuleError, ValueError) as error:
        raise LedgerUnavailable("ledger.url cannot be used for shadow pairs") from error

    def set_up(connection: DBAPIConnection, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        cursor.close()

    def roll_back(connection: DBAPIConnection, _: object, error: BaseException | None) -> None:
        # A cancelled call leaves its thread inside a transaction, which holds the ledger's lock until then.
        if error is not None:
            with contextlib.suppress(sqlite3.Error, ValueError):
                connection.rollback()

    event.listen(engine.sync_engine, "connect", set_up)
    event.listen(engine.sync_engine, "invalidate", roll_back)
    return engine


def _unavailable(error: Exception) -> LedgerUnavailable:
    kind = type(getattr(error, "orig", None) or error).__name__
    return LedgerUnavailable(f"the shadow pairs cannot be reached now ({kind})")


def _columns(pair: ShadowPair) -> dict[str, Any]:
    return {
        "pair_id": pair.pair_id,
        "generation_id": pair.generation_id,
        "at": pair.at,
        "route": pair.route,
        "prompt_version": pair.prompt_version,
        "adapter_id": pair.adapter_id,
        "intent": pair.intent,
        "likeness": pair.likeness,
        "meaning": pair.meaning,
        "judged": pair.judged,
        "primary_side": _json(pair.primary),
        "shadow_side": _json(pair.shadow),
    }


def _json(side: ShadowSide) -> str:
    # Escaped, because PostgreSQL takes no NUL in a text and a lone surrogate is no UTF-8.
    return json.dumps(asdict(replace(side, checks=dict(side.checks))), separators=(",", ":"))


def _pair(columns: RowMapping) -> ShadowPair:
    sides = {name: _side(json.loads(columns[f"{name}_side"])) for name in ("primary", "shadow")}
    rest = {name: value for name, value in columns.items() if not name.endswith("_side")}
    return ShadowPair(**rest, primary=sides["primary"], shadow=sides["shadow"])


def _side(told: dict[str, Any]) -> ShadowSide:
    return ShadowSide(**{**told, "checks": MappingProxyType(told["checks"])})
