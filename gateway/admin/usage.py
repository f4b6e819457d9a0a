"""What operators see of the ledger."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select

from accounting.errors import LedgerUnavailable
from accounting.reconcile import Reconciliation
from accounting.reports import MAX_LINES, Page, Span, UsageReport, too_many
from gateway.errors import BackendUnavailable, InvalidRequest


@dataclass(frozen=True, slots=True)
class UsageAdmin:
    """Implements ``gateway.ports.UsageService``.

    Args:
        read: asks the ledger's database.
    """

    read: Callable[[Select[Any]], Awaitable[list[dict[str, Any]]]]

    async def report(self, report: UsageReport) -> Mapping[str, object]:
        """Sums, sorted by what they are by. Raises InvalidRequest (too many lines), BackendUnavailable."""
        found = await self._found(report.query())
        if too_many(found):
            raise InvalidRequest(
                f"by: more than {MAX_LINES} lines; allowed: fewer keys, or a shorter time (since, until)",
                param="by",
            )
        # A sum by nothing has a line even of no rows.
        return {"rows": [report.line(line) for line in found if line["requests"]]}

    async def rows(self, page: Page) -> Mapping[str, object]:
        """A page of rows; ``next`` is what the next one comes after, ``null`` at the end.

        Raises BackendUnavailable.
        """
        found = await self._found(page.query())
        last = found[-1] if len(found) == page.limit else None
        mark = None if last is None else f"{last['started_at']!r}~{last['generation_id']}"
        return {"rows": found, "next": mark}

    async def reconcile(self, span: Span) -> Mapping[str, object]:
        """The ledger beside the engines' own counters. Raises BackendUnavailable."""
        reconciliation = Reconciliation(span)
        lines = reconciliation.lines(
            await self._found(reconciliation.ledger_query()),
            await self._found(reconciliation.engines_query()),
        )
        return {"rows": lines}

    async def _found(self, query: Select[Any]) -> list[dict[str, Any]]:
        try:
            return await self.read(query)
        except LedgerUnavailable as error:
            raise BackendUnavailable(str(error)) from error
