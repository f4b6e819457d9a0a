"""Reports of the ledger's database for operators: sums, rows, a reconciliation, shadowed requests."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Select
from typing_extensions import TypedDict

from accounting.reconcile import compared_lines, engines_query, ledger_query
from accounting.reports import DIMENSIONS, MAX_LINES, MAX_PAGE, Page, Span, UsageReport
from accounting.shadow_pairs import ShadowPairStore
from accounting.values import Kind
from gateway.contracts.refusals import not_allowed
from gateway.contracts.times import TIMES, Time
from gateway.errors import InvalidRequest
from gateway.routing.change import require_route
from gateway.shadow.report import make_report

DEFAULT_PAGE = 1_000  # rows; MAX_PAGE of them would hold the event loop for a tenth of a second
DEFAULT_PAIRS = 1_000
MAX_PAIRS = 10_000  # a report of so many pairs takes about 8 s in a thread


def _dimensions(given: str) -> tuple[str, ...]:
    named = tuple(dict.fromkeys(one.strip() for one in given.split(",") if one.strip()))
    for one in named:
        if one not in DIMENSIONS:
            raise not_allowed("by", f"names {one!r:.80}", f"{', '.join(DIMENSIONS)}, with commas between")
    return named


def _after(given: str) -> tuple[float, str]:
    at, mark, generation_id = given.partition("~")
    try:
        started_at = float(at)
    except ValueError:
        started_at = math.nan
    if not mark or not math.isfinite(started_at):
        raise not_allowed("after", f"is {given!r:.80}", "the 'next' of a page")
    return started_at, generation_id


class SpanQuery(BaseModel):
    """Rows that started at or after ``since`` and before ``until``."""

    model_config = ConfigDict(frozen=True)

    since: Annotated[Time | None, Field(description=f"From then on: {TIMES}.")] = None
    until: Annotated[Time | None, Field(description="The same; rows from then on are not included.")] = None

    def span(self) -> Span:
        """Return the span. Raises InvalidRequest if it is empty."""
        if self.since is not None and self.until is not None and self.since >= self.until:
            since, until = (datetime.fromtimestamp(at, UTC).isoformat() for at in (self.since, self.until))
            raise not_allowed("until", f"is {until}, and since is {since}", "a time later than since")
        return Span(self.since, self.until)


class SumsQuery(SpanQuery):
    """The dimensions by which rows are summed, and the rows' kind and time."""

    by: Annotated[str, Field(description=f"Some of {', '.join(DIMENSIONS)}, with commas between.")] = "tenant"
    kind: Kind = "request"


class RowsQuery(SpanQuery):
    """The page of rows."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE
    after: Annotated[str | None, Field(description="The 'next' of the page before.")] = None


class UsageSumsBody(TypedDict):
    """Sums, with the keys of ``by`` in each line."""

    rows: list[dict[str, Any]]


class UsageRowsBody(UsageSumsBody):
    """A page; ``next`` is the ``after`` of the next page, ``null`` at the end."""

    next: str | None


@dataclass(frozen=True, slots=True)
class UsageAdmin:
    """Reads the ledger's database; raises LedgerUnavailable."""

    read: Callable[[Select[Any]], Awaitable[list[dict[str, Any]]]]
    unix_time: Callable[[], float]

    async def report(self, query: SumsQuery) -> UsageSumsBody:
        """Return sums, sorted by their dimensions. Raises InvalidRequest for too many lines."""
        report = UsageReport(_dimensions(query.by), query.span(), query.kind)
        found = await self.read(report.query())
        if len(found) > MAX_LINES:
            raise InvalidRequest(
                f"by: more than {MAX_LINES} lines; allowed: fewer keys, or a shorter time (since, until)",
                param="by",
            )
        # Without dimensions, SQL returns one line even if there are no rows.
        return {"rows": [dict(report.line(line)) for line in found if line["requests"]]}

    async def rows(self, query: RowsQuery) -> UsageRowsBody:
        after = None if query.after is None else _after(query.after)
        found = await self.read(Page(query.span(), query.limit, after).query())
        last = found[-1] if len(found) == query.limit else None
        mark = None if last is None else f"{last['started_at']!r}~{last['generation_id']}"
        return {"rows": found, "next": mark}

    async def reconcile(self, query: SpanQuery) -> UsageSumsBody:
        span = query.span()
        ledger, engines = await self.read(ledger_query(span)), await self.read(engines_query(span))
        lines = compared_lines(ledger, engines, self.unix_time())
        return {"rows": [dict(line) for line in lines]}


class ShadowQuery(BaseModel):
    """The pairs of a report: the newest ``limit`` ones, of one route or all, since a time."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAIRS)] = DEFAULT_PAIRS
    route: str | None = None
    since: Annotated[Time | None, Field(description=f"From then on: {TIMES}.")] = None


class ShadowAdmin:
    """Makes reports of the pairs in the ledger's database, whichever process wrote them."""

    def __init__(self, pairs: ShadowPairStore, routes: Callable[[], Collection[str]]) -> None:
        self._pairs = pairs
        self._routes = routes
        # A report takes a thread for seconds, so there is one at a time.
        self._one = asyncio.Lock()

    async def report(self, query: ShadowQuery) -> dict[str, Any]:
        """Compare the newest pairs. Raises LedgerUnavailable; UnknownRoute for one without pairs."""
        async with self._one:
            pairs = await self._pairs.newest(query.limit, route=query.route, since=query.since)
            if query.route is not None and not pairs:
                require_route(query.route, self._routes())
            return dict(await asyncio.to_thread(make_report, pairs))
