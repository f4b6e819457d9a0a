"""Reports of shadowed requests for operators."""

import asyncio
from typing import Annotated, Any

from pydantic import BaseModel, Field

from accounting.shadow_pairs import ShadowPairStore
from gateway.contracts.times import TIMES, Time
from gateway.shadow.report import make_report

DEFAULT_PAIRS = 1_000
# A report of so many pairs takes about 8 s in a thread.
MAX_PAIRS = 10_000


class ShadowQuery(BaseModel):
    """The pairs of a report: the newest ``limit`` ones, of one route or all, since a time."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAIRS)] = DEFAULT_PAIRS
    route: str | None = None
    since: Annotated[Time | None, Field(description=f"From then on: {TIMES}.")] = None


class ShadowAdmin:
    """Makes reports of the pairs in the ledger's database, whichever process wrote them."""

    def __init__(self, pairs: ShadowPairStore) -> None:
        self._pairs = pairs
        # A report takes a thread for seconds, so there is one at a time.
        self._one = asyncio.Lock()

    async def report(self, query: ShadowQuery) -> dict[str, Any]:
        """Compare the newest pairs. Raises LedgerUnavailable."""
        async with self._one:
            pairs = await self._pairs.newest(query.limit, route=query.route, since=query.since)
            return dict(await asyncio.to_thread(make_report, pairs))
