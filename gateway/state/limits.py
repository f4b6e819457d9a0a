"""Limits of keys that several gateway processes share: the interface of the stores."""

from collections.abc import Sequence
from typing import Protocol

from accounting.keys import Budget, KeyLimits
from accounting.quotas import QuotaRequest, QuotaVerdict, Settlement
from accounting.values import DAY_S

LEASE_S = 10.0
"""Seconds for which the tokens that a process holds count without a renewal of its lease; a running process
renews five times as often. After a crash its tokens are free within ten seconds."""
KEPT_S = 32 * DAY_S
"""An unused account is deleted after this time, in seconds; its longest window, a month, is empty then."""


class LimitStore(Protocol):
    """Decides on requests for all processes, by one clock; need not be opened.

    Invariants: a decision is atomic; tokens of a holder whose lease has expired do not count. Every operation
    raises StateUnavailable if the store does not answer or is too busy.
    """

    async def close(self) -> None:
        """Close connections."""

    async def take(
        self, key_id: str, limits: KeyLimits | Budget, ask: QuotaRequest, *, fresh: bool
    ) -> QuotaVerdict | None:
        """Decide on a request for all limits in one round trip.

        ``fresh``: the holder holds no tokens, so an expired lease may be renewed. Returns ``None`` if the
        lease has expired and may not be renewed: nothing was counted, and the holder needs a new name.
        """

    async def settle(self, sender: str, number: int, settlements: Sequence[Settlement]) -> None:
        """Replace held tokens by the tokens that were used, all or none.

        ``sender`` numbers its batches upwards and repeats one until it is answered. A batch that was settled
        before, whose answer was lost, changes nothing.
        """

    async def renew(self, holder: str) -> bool:
        """Renew the holder's lease; ``False``: it has expired."""
