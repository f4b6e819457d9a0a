"""Sums of the ledger's rows by day, which reports read in place of the rows of whole days.

A day's sums are made under a lock that keeps rows from being written, and triggers note each later change of
its rows in the same transaction: a day that is not noted has the sums of its rows.
"""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import ColumnElement, case, delete, func, insert, literal, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.tables import generations, open_days, usage_sums
from accounting.values import DAY_S

_table = generations.c
# What is summed: name and a row's value.
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
# The columns that are summed by together: a key mostly has one tenant, and a route one or two backends, so
# each has far fewer combinations than all columns have together.
CUBES: Final[Mapping[str, tuple[str, ...]]] = {
    "caller": ("tenant", "org", "key_id", "model"),
    "place": ("route", "adapter_id", "backend_name"),
    "user": ("user_id",),
}


async def sum_a_day(connection: AsyncConnection, before: int) -> bool:
    """Sum up the last open day before ``before`` (days since 1970), in the connection's transaction.

    ``False``: there is none.
    """
    earlier = select(func.max(open_days.c.day)).where(open_days.c.day < before)
    day = (await connection.execute(earlier)).scalar()
    if day is None:
        return False
    if connection.dialect.name == "postgresql":
        # Waits for rows that are being written, and lets no others come. In SQLite each change does.
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
