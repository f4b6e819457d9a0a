"""The table ``shadow_pairs`` in the ledger's database."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from sqlalchemy import Column, Index, PrimaryKeyConstraint, RowMapping, Table, Text, delete, select

from accounting.shadow_values import ShadowPair, ShadowSide
from accounting.store import FurtherTables
from accounting.tables import columns_of, insert_into, metadata, value_of

SIDES = ("primary", "shadow")

shadow_pairs = Table(
    "shadow_pairs",
    metadata,
    *(column for column in columns_of(ShadowPair) if column.name not in SIDES),
    *(Column(f"{name}_side", Text, nullable=False) for name in SIDES),
    PrimaryKeyConstraint("pair_id"),
    Index("ix_shadow_pairs_at", "at"),
)

POOL_CONNECTIONS = 2  # the writer and one report
TIMEOUT_S: Final = 30.0  # longest wait for the database; a report reads all pairs


class ShadowPairStore(FurtherTables):
    """Stores pairs in the ledger's database; deletes the oldest pairs beyond ``keep_pairs``, and all that are
    older than ``keep_s``.
    """

    def __init__(self, url: str, *, keep_pairs: int, keep_s: float, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(
            url, "the shadow pairs cannot be reached now", timeout_s=timeout_s, connections=POOL_CONNECTIONS
        )
        self._keep_pairs = keep_pairs
        self._keep_s = keep_s

    async def write(self, pairs: Sequence[ShadowPair], *, now: float) -> None:
        """Make pairs durable and delete old ones, in one transaction. Raises LedgerUnavailable."""
        at = shadow_pairs.c.at
        async with self._transaction() as connection:
            if rows := [_columns(pair) for pair in pairs]:
                insert = insert_into(shadow_pairs, connection.dialect)
                await connection.execute(insert.on_conflict_do_nothing(index_elements=["pair_id"]), rows)
            await connection.execute(delete(shadow_pairs).where(at < now - self._keep_s))
            surplus = select(at).order_by(at.desc()).offset(self._keep_pairs).limit(1)
            newest_surplus = (await connection.execute(surplus)).scalar()
            if newest_surplus is not None:
                await connection.execute(delete(shadow_pairs).where(at <= newest_surplus))

    async def newest(
        self, limit: int, *, route: str | None = None, since: float | None = None
    ) -> list[ShadowPair]:
        """The newest pairs, newest first. Raises LedgerUnavailable."""
        query = select(shadow_pairs).order_by(shadow_pairs.c.at.desc()).limit(limit)
        if route is not None:
            query = query.filter_by(route=route)
        if since is not None:
            query = query.where(shadow_pairs.c.at >= since)
        return [_pair(columns) for columns in await self._rows(query)]


def _columns(pair: ShadowPair) -> dict[str, Any]:
    columns = asdict(pair)
    # ASCII with escapes: PostgreSQL refuses NUL in a text, and a lone surrogate is not valid UTF-8.
    sides = {f"{name}_side": json.dumps(columns.pop(name), separators=(",", ":")) for name in SIDES}
    return {**columns, **sides}


def _pair(columns: RowMapping) -> ShadowPair:
    sides = {name: ShadowSide(**json.loads(columns[f"{name}_side"])) for name in SIDES}
    return value_of({**columns, **sides}, ShadowPair)
