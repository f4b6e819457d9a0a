"""Sums of the ledger's rows by day, which reports read in place of the rows of whole days.

A day is summed up under a lock that blocks writes of rows. Triggers add a day to ``open_days`` in the same
transaction that changes one of its rows. So the sums of a day that is not in ``open_days`` are correct.
"""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import ColumnElement, case, delete, func, insert, literal, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.tables import generations, open_days, usage_sums
from accounting.values import DAY_S

_table = generations.c
# The sums: name, and the value of one row.
VALUES: Final[Mapping[str, ColumnElement[Any]]] = {
    "requests": literal(1),
    "input_tokens": _table.input_tokens,
    "output_tokens": _table.output_tokens,
    "cached_tokens": _table.cached_tokens,
    "cost_nanousd": _table.cost_nanousd,
    "unpriced_tokens": case(
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


async def sum_a_day(connection: AsyncConnection, before: int) -> bool:
    """Sum up the last open day before ``before`` (days since 1970), in the connection's transaction.

    Returns ``False`` when there is none.
    """
    earlier = select(func.max(open_days.c.day)).where(open_days.c.day < before)
    day = (await connection.execute(earlier)).scalar()
    if day is None:
        return False
    if connection.dialect.name == "postgresql":
        # Waits for writes in progress and blocks new ones. In SQLite any write transaction does.
        await connection.execute(text("LOCK TABLE generations IN SHARE ROW EXCLUSIVE MODE"))
    await connection.execute(delete(usage_sums).where(usage_sums.c.day == day))
    for cube, names in CUBES.items():
        keys = [_table.kind, *(_table[name] for name in names)]
        sums = select(
            literal(cube), literal(day), *keys, *(func.sum(value) for value in VALUES.values())
        ).where(_table.started_at >= day * DAY_S, _table.started_at < (day + 1) * DAY_S)
        into = ["cube", "day", "kind", *names, *VALUES]
        await connection.execute(insert(usage_sums).from_select(into, sums.group_by(*keys)))
    await connection.execute(delete(open_days).where(open_days.c.day == day))
    return True
