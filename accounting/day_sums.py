"""Sums of the ledger's rows by day, which reports read in place of the rows of whole days.

A day is summed up under a lock that blocks writes of rows. Triggers add a day to ``open_days`` in the same
transaction that changes one of its rows. So the sums of a day that is not in ``open_days`` are correct.
"""

from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.tables import generations, metadata
from accounting.values import DAY_S

_table = generations.c
# The sums: name, and the value of one row.
VALUES: Final[Mapping[str, sa.ColumnElement[Any]]] = {
    "requests": sa.literal(1),
    "input_tokens": _table.input_tokens,
    "output_tokens": _table.output_tokens,
    "cached_tokens": _table.cached_tokens,
    "cost_nanousd": _table.cost_nanousd,
    "unpriced_tokens": sa.case(
        (_table.price_version.is_(None), _table.input_tokens + _table.output_tokens), else_=0
    ),
    "billed_tokens": _table.billable_input_tokens + _table.billable_output_tokens,
}
# The groups of columns to sum by. A key mostly has one tenant, and a route one or two backends, so each group
# has far fewer combinations than all columns together.
CUBES: Final[Mapping[str, tuple[str, ...]]] = {
    "caller": ("tenant", "org", "key_id", "model"),
    "place": ("route", "adapter_id", "backend_name"),
    "user": ("user_id",),
}
# Sums of whole days (since 1970, UTC), grouped by the columns of one of the cubes; the others are null.
usage_sums = sa.Table(
    "usage_sums",
    metadata,
    sa.Column("cube", sa.Text, nullable=False),
    sa.Column("day", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    *(sa.Column(name, sa.Text) for names in CUBES.values() for name in names),
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in VALUES),
    sa.Index("ix_usage_sums_cube_day", "cube", "day"),
    sa.Index("ix_usage_sums_day", "day"),
)
# Triggers insert each day whose rows change; the sums of such a day are missing or out of date.
open_days = sa.Table(
    "open_days", metadata, sa.Column("day", sa.BigInteger, primary_key=True, autoincrement=False)
)


async def sum_a_day(connection: AsyncConnection, before: int) -> bool:
    """Sum up the last open day before ``before`` (days since 1970), in the connection's transaction.

    Returns ``False`` when there is none.
    """
    earlier = sa.select(sa.func.max(open_days.c.day)).where(open_days.c.day < before)
    day = (await connection.execute(earlier)).scalar()
    if day is None:
        return False
    if connection.dialect.name == "postgresql":
        # Waits for writes in progress and blocks new ones. In SQLite any write transaction does.
        await connection.execute(sa.text("LOCK TABLE generations IN SHARE ROW EXCLUSIVE MODE"))
    await connection.execute(sa.delete(usage_sums).where(usage_sums.c.day == day))
    for cube, names in CUBES.items():
        keys = [_table.kind, *(_table[name] for name in names)]
        sums = sa.select(
            sa.literal(cube), sa.literal(day), *keys, *(sa.func.sum(value) for value in VALUES.values())
        ).where(_table.started_at >= day * DAY_S, _table.started_at < (day + 1) * DAY_S)
        into = ["cube", "day", "kind", *names, *VALUES]
        await connection.execute(sa.insert(usage_sums).from_select(into, sums.group_by(*keys)))
    await connection.execute(sa.delete(open_days).where(open_days.c.day == day))
    return True
