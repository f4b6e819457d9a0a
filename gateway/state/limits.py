"""Keys' limits that several gateway processes share: what every such store holds to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from accounting.keys import KeyLimits
from accounting.quotas import DAY_S, QuotaRequest, QuotaVerdict, Settlement

LEASE_S = 10.0
"""How long a process that is not heard of still holds tokens; a running one renews five times in it. The
process of a crash therefore keeps its tenants from nothing after ten seconds."""
KEPT_S = DAY_S + 3_600
"""An account that nobody asks for is forgotten when all its windows are empty for sure."""


class LimitStore(Protocol):
    """Decides on requests for all processes at once, by its own clock; needs no opening.

    Invariants: a decision is one step, whoever else asks; what a holder has whose lease is over counts no
    longer. Every operation raises StateUnavailable when the store does not answer or is too busy.
    """

    async def close(self) -> None:
        """Let go of connections."""

    async def take(
        self, key_id: str, limits: KeyLimits, ask: QuotaRequest, *, fresh: bool
    ) -> QuotaVerdict | None:
        """Decide on a request, all limits in one round trip.

        ``fresh``: the holder has nothing held that it knows of, so a lease that is over may begin anew.
        ``None``: it is over and may not; nothing was counted, and the holder needs another name.
        """

    async def settle(self, told: Sequence[Settlement]) -> None:
        """Replace what is held by what was used."""

    async def renew(self, holder: str) -> bool:
        """Keep the holder's lease; ``False``: it is over."""
