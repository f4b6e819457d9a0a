"""How shadowed requests compare, for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from accounting.errors import LedgerUnavailable
from accounting.shadow_values import ShadowPair
from gateway.errors import BackendUnavailable
from gateway.shadow.report import make_report


class ReadsPairs(Protocol):
    """Where pairs are."""

    async def newest(
        self, limit: int, *, route: str | None = None, since: float | None = None
    ) -> Sequence[ShadowPair]:
        """Newest first. Raises LedgerUnavailable."""


class ShadowAdmin:
    """Makes reports of the pairs that the ledger's database holds, whichever process wrote them."""

    def __init__(self, pairs: ReadsPairs) -> None:
        self._pairs = pairs
        # A report takes a thread for seconds; of several the others wait.
        self._one = asyncio.Lock()

    async def report(
        self, *, limit: int, route: str | None = None, since: float | None = None
    ) -> Mapping[str, object]:
        """The newest ``limit`` pairs, compared.

        Raises:
            BackendUnavailable: the ledger's database is away.
        """
        async with self._one:
            try:
                pairs = await self._pairs.newest(limit, route=route, since=since)
            except LedgerUnavailable as error:
                raise BackendUnavailable(str(error)) from None
            return await asyncio.to_thread(make_report, pairs)
