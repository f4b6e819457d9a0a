"""The table ``shadow_pairs`` in the ledger's database."""

import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, fields, replace
from types import MappingProxyType
from typing import Any

from sqlalchemy import Column, Double, Index, RowMapping, Table, Text, delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, InvalidRequestError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from accounting.errors import LedgerUnavailable
from accounting.shadow_values import ShadowPair, ShadowSide
from accounting.store import make_engine, unavailable
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

# The writer and one report.
POOL_CONNECTIONS = 2


class ShadowPairStore:
    """Stores pairs in the ledger's database; deletes the oldest beyond ``keep_pairs`` and those older than
    ``keep_s``.
    """

    def __init__(self, url: str, *, keep_pairs: int, keep_s: float) -> None:
        self._url = url
        self._keep_pairs = keep_pairs
        self._keep_s = keep_s
        self._engine: AsyncEngine | None = None
        self._prepared = False

    async def write(self, pairs: Sequence[ShadowPair], *, now: float) -> None:
        """Make pairs durable and delete old ones, in one transaction. Raises LedgerUnavailable."""
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
            raise unavailable("the shadow pairs cannot be reached now", error) from error

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
            raise unavailable("the shadow pairs cannot be reached now", error) from error
        return [_pair(columns) for columns in found]

    async def close(self) -> None:
        """Close the connections."""
        engine, self._engine, self._prepared = self._engine, None, False
        if engine is not None:
            await engine.dispose()

    async def _begin(self) -> AbstractAsyncContextManager[AsyncConnection]:
        if self._engine is None:
            self._engine = _engine(self._url)
        if not self._prepared:
            await bring_up(self._engine)
            self._prepared = True
        return self._engine.begin()

    async def _forget_connections(self) -> None:
        """Connect again next time: the file may have been replaced, the server may have lost its tables."""
        self._prepared = False
        if self._engine is not None:
            await self._engine.dispose()


def _engine(url: str) -> AsyncEngine:
    try:
        return make_engine(make_url(url), POOL_CONNECTIONS)
    except (ArgumentError, ImportError, InvalidRequestError, NoSuchModuleError, ValueError) as error:
        raise LedgerUnavailable("ledger.url cannot be used for shadow pairs") from error


def _columns(pair: ShadowPair) -> dict[str, Any]:
    columns = {one.name: getattr(pair, one.name) for one in fields(pair)}
    primary, shadow = _json(columns.pop("primary")), _json(columns.pop("shadow"))
    return {**columns, "primary_side": primary, "shadow_side": shadow}


def _json(side: ShadowSide) -> str:
    # Escaped, because PostgreSQL takes no NUL in a text and a lone surrogate is no UTF-8.
    return json.dumps(asdict(replace(side, checks=dict(side.checks))), separators=(",", ":"))


def _pair(columns: RowMapping) -> ShadowPair:
    sides = {name: _side(json.loads(columns[f"{name}_side"])) for name in ("primary", "shadow")}
    rest = {name: value for name, value in columns.items() if not name.endswith("_side")}
    return ShadowPair(**rest, primary=sides["primary"], shadow=sides["shadow"])


def _side(found: dict[str, Any]) -> ShadowSide:
    return ShadowSide(**{**found, "checks": MappingProxyType(found["checks"])})
