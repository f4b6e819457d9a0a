"""Usage reports: sums over the ledger's rows, and pages of rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa

from accounting.day_sums import CUBES, VALUES, open_days, usage_sums
from accounting.tables import generations
from accounting.values import DAY_S, HOUR_S, Kind

_HOURS_A_DAY: Final = 24
MAX_LINES: Final = 10_000  # most lines of a report; more dimensions need a shorter span
MAX_PAGE: Final = 10_000  # most rows of a page: about 10 MB as JSON

_table = generations.c

# Dimensions of the sums: name and column.
DIMENSIONS: Final[Mapping[str, sa.ColumnElement[Any]]] = {
    # An expression, not the column: SQLite would group by the tenant index and read the rows in random order.
    "tenant": _table.tenant.op("||")(sa.literal_column("''")),
    "org": _table.org,
    "user": _table.user_id,
    "key": _table.key_id,
    "route": _table.route,
    "model": _table.model,
    "adapter": _table.adapter_id,
    "backend": _table.backend_name,
    "day": _table.hour // _HOURS_A_DAY,
    "hour": _table.hour,
}
# Dimensions whose column has another name.
_COLUMNS: Final = {"user": "user_id", "key": "key_id", "adapter": "adapter_id", "backend": "backend_name"}


@dataclass(frozen=True, slots=True)
class Span:
    """Rows that started from ``since`` up to before ``until``, Unix seconds; ``None``: no bound."""

    since: float | None = None
    until: float | None = None

    def clauses(self) -> list[sa.ColumnElement[bool]]:
        """Both bounds as SQL conditions; the conditions on ``hour`` limit the partitions that are read."""
        found = self.hours(_table.hour)
        if self.since is not None:
            found.append(_table.started_at >= self.since)
        if self.until is not None:
            found.append(_table.started_at < self.until)
        return found

    def hours(self, hour: sa.ColumnElement[Any]) -> list[sa.ColumnElement[bool]]:
        """Both bounds as conditions on a column of hours; the hours of the bounds are included whole."""
        found: list[sa.ColumnElement[bool]] = []
        if self.since is not None:
            found.append(hour >= int(self.since // HOUR_S))
        if self.until is not None:
            found.append(hour <= int(self.until // HOUR_S))
        return found


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Sums over the rows of one kind, grouped by some of :data:`DIMENSIONS`."""

    by: tuple[str, ...]
    span: Span = field(default_factory=Span)
    kind: Kind = "request"

    def query(self) -> sa.Select[Any]:
        """The report's query; it returns at most one line more than :data:`MAX_LINES`."""
        columns = {name: DIMENSIONS[name] for name in self.by}
        found = sa.select(
            *(column.label(f"by_{name}") for name, column in columns.items()),
            *(value.label(name) for name, value in VALUES.items()),
            # ``between``, not ``==``: SQLite would first build an index over the kinds of all rows.
        ).where(_table.kind.between(self.kind, self.kind), *self.span.clauses())
        wanted = {_COLUMNS.get(name, name) for name in self.by} - {"day"}
        cube = next((name for name, has in CUBES.items() if wanted <= {*has}), None)
        rows = (found if cube is None else self._with_sums(cube, found)).subquery()
        groups = [rows.c[f"by_{name}"] for name in self.by]
        sums = [sa.func.sum(rows.c[name]).label(name) for name in VALUES]
        return sa.select(*groups, *sums).group_by(*groups).order_by(*groups).limit(MAX_LINES + 1)

    def _with_sums(self, cube: str, rows: sa.Select[Any]) -> sa.CompoundSelect[Any]:
        """The rows of open days and of days that the span includes in part; the sums of all other days."""
        cuts = [at for at in (self.span.since, self.span.until) if at is not None]
        days = sa.select(open_days.c.day)
        sums = sa.select(
            *(usage_sums.c[_COLUMNS.get(name, name)] for name in self.by),
            *(usage_sums.c[name] for name in VALUES),
        ).where(usage_sums.c.cube == cube, usage_sums.c.kind == self.kind)
        if self.span.since is not None:
            first = int(self.span.since // DAY_S)
            days, sums = days.where(open_days.c.day >= first), sums.where(usage_sums.c.day >= first)
        if self.span.until is not None:
            end = math.ceil(self.span.until / DAY_S)
            days, sums = days.where(open_days.c.day < end), sums.where(usage_sums.c.day < end)
        cut = [sa.select(sa.literal(int(at // DAY_S))) for at in cuts if at % DAY_S]
        read = sa.union(days, *cut).cte("read_days")
        begin = read.c.day * DAY_S
        return sa.union_all(
            # The range lets the index serve a few days; ``day + 0`` lets PostgreSQL scan once for many days.
            rows.where(
                _table.started_at >= begin,
                _table.started_at < begin + DAY_S,
                _table.hour // _HOURS_A_DAY == read.c.day + 0,
            ),
            sums.where(usage_sums.c.day.not_in(sa.select(read.c.day))),
        )

    def line(self, found: Mapping[str, Any]) -> dict[str, object]:
        """A line of the report; ``margin_tokens`` are billed tokens that were not computed."""
        line: dict[str, object] = {name: _formatted(name, found[f"by_{name}"]) for name in self.by}
        # PostgreSQL returns sums of integers as decimals; a sum over no rows is NULL.
        sums = {name: int(found[name] or 0) for name in VALUES}
        # Cached tokens were not computed.
        computed = sums["input_tokens"] - sums["cached_tokens"] + sums["output_tokens"]
        margin = sums["billed_tokens"] - computed
        return {**line, **sums, "computed_tokens": computed, "margin_tokens": margin}


@dataclass(frozen=True, slots=True)
class Page:
    """A page of rows of all kinds, after the row ``after`` (start and generation id)."""

    span: Span
    limit: int = MAX_PAGE
    after: tuple[float, str] | None = None

    def query(self) -> sa.Select[Any]:
        """The page's rows, in the order of start and generation id."""
        found = sa.select(generations).where(*self.span.clauses())
        if self.after is not None:
            at, generation_id = self.after
            found = found.where(
                sa.or_(
                    _table.started_at > at,
                    sa.and_(_table.started_at == at, _table.generation_id > generation_id),
                )
            )
        return found.order_by(_table.started_at, _table.generation_id).limit(self.limit)


def _formatted(name: str, value: Any) -> object:
    if name == "day":
        return datetime.fromtimestamp(value * _HOURS_A_DAY * HOUR_S, UTC).date().isoformat()
    if name == "hour":
        return datetime.fromtimestamp(value * HOUR_S, UTC).isoformat(timespec="minutes")
    return value
