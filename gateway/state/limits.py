"""Limits of keys that several gateway processes share: what every such store guarantees."""

from collections.abc import Sequence
from typing import Protocol

from accounting.keys import Budget, KeyLimits
from accounting.quotas import DAY_S, QuotaRequest, QuotaVerdict, Settlement

LEASE_S = 10.0
"""How long a process holds tokens without renewing its lease; a running one renews five times as often. After
a crash the tokens it held are free again within ten seconds."""
KEPT_S = 32 * DAY_S
"""An unused account is deleted once all its windows must be empty: the longest is a month."""


class LimitStore(Protocol):
    """Decides on requests for all processes at once, by its own clock; needs no opening.

    Invariants: a decision is atomic; tokens of a holder whose lease has expired do not count. Every operation
    raises StateUnavailable when the store does not answer or is too busy.
    """

    async def close(self) -> None:
        """Close connections."""

    async def take(
        self, key_id: str, limits: KeyLimits | Budget, ask: QuotaRequest, *, fresh: bool
    ) -> QuotaVerdict | None:
        """Decide on a request, all limits in one round trip.

        ``fresh``: the holder knows of no tokens it holds, so an expired lease may be renewed. ``None``: the
        lease has expired and may not be renewed; nothing was counted, and the holder needs another name.
        """

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Replace the held tokens by those used."""

    async def renew(self, holder: str) -> bool:
        """Renew the holder's lease; ``False``: it has expired."""
