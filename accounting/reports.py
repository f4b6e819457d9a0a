"""Usage reports: sums of the ledger's rows, and the rows page by page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, case, func, literal_column, or_, select

from accounting.tables import generations
from accounting.values import HOUR_S, Kind

_HOURS_A_DAY: Final = 24
# Most lines of a report; more dimensions need a shorter span.
MAX_LINES: Final = 10_000
# Most rows of a page: about 10 MB as JSON.
MAX_PAGE: Final = 10_000

_table = generations.c
# Dimensions of the sums: name and column.
DIMENSIONS: Final[Mapping[str, ColumnElement[Any]]] = MappingProxyType(
    {
        # No bare column: SQLite would group by the index of tenants, and read every row at random.
        "tenant": _table.tenant.op("||")(literal_column("''")),
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
)
_SUMS: Final[Mapping[str, ColumnElement[Any]]] = MappingProxyType(
    {
        "requests": func.count(),
        "input_tokens": func.sum(_table.input_tokens),
        "output_tokens": func.sum(_table.output_tokens),
        "cached_tokens": func.sum(_table.cached_tokens),
        "cost_nanousd": func.sum(_table.cost_nanousd),
        "unpriced_tokens": func.sum(
            case((_table.price_version.is_(None), _table.input_tokens + _table.output_tokens), else_=0)
        ),
        "billed_tokens": func.sum(_table.billable_input_tokens + _table.billable_output_tokens),
        # Cached tokens were not computed.
        "computed_tokens": func.sum(_table.input_tokens - _table.cached_tokens + _table.output_tokens),
    }
)


@dataclass(frozen=True, slots=True)
class Span:
    """Rows that started from ``since`` up to before ``until``, Unix seconds; ``None``: no bound."""

    since: float | None = None
    until: float | None = None

    def clauses(self) -> list[ColumnElement[bool]]:
        """The same for a query; the hours, so that only the partitions concerned are read."""
        found: list[ColumnElement[bool]] = []
        if self.since is not None:
            found += [_table.started_at >= self.since, _table.hour >= int(self.since // HOUR_S)]
        if self.until is not None:
            found += [_table.started_at < self.until, _table.hour <= int(self.until // HOUR_S)]
        return found


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Sums by some of :data:`DIMENSIONS`, of one kind of rows."""

    by: tuple[str, ...]
    span: Span = field(default_factory=Span)
    kind: Kind = "request"

    def query(self) -> Select[Any]:
        """At most one line more than :data:`MAX_LINES`, so that too many are detected."""
        keys = [DIMENSIONS[name].label(f"by_{name}") for name in self.by]
        sums = [column.label(name) for name, column in _SUMS.items()]
        found = select(*keys, *sums).where(_table.kind == self.kind, *self.span.clauses())
        groups = [DIMENSIONS[name] for name in self.by]
        return found.group_by(*groups).order_by(*groups).limit(MAX_LINES + 1)

    def line(self, found: Mapping[str, Any]) -> dict[str, object]:
        """A line of the report; ``margin_tokens`` are those billed that were not computed."""
        line: dict[str, object] = {name: _told(name, found[f"by_{name}"]) for name in self.by}
        # PostgreSQL's sums of whole numbers are decimals, and of nothing are nothing.
        sums = {name: int(found[name] or 0) for name in _SUMS}
        return {**line, **sums, "margin_tokens": sums["billed_tokens"] - sums["computed_tokens"]}


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of all kinds in the order of start and generation, after the last row of the page before."""

    span: Span
    limit: int = MAX_PAGE
    after: tuple[float, str] | None = None

    def query(self) -> Select[Any]:
        """Rows in the order of start and generation."""
        found = select(generations).where(*self.span.clauses())
        if self.after is not None:
            at, generation_id = self.after
            found = found.where(
                or_(
                    _table.started_at > at,
                    and_(_table.started_at == at, _table.generation_id > generation_id),
                )
            )
        return found.order_by(_table.started_at, _table.generation_id).limit(self.limit)


def too_many(lines: Sequence[object]) -> bool:
    """Whether a report has more lines than are returned."""
    return len(lines) > MAX_LINES


def _told(name: str, value: Any) -> object:
    if name == "day":
        return datetime.fromtimestamp(value * _HOURS_A_DAY * HOUR_S, UTC).date().isoformat()
    if name == "hour":
        return datetime.fromtimestamp(value * HOUR_S, UTC).isoformat(timespec="minutes")
    return value
