"""Which leases in the ledger's database are over: those of gateways that no longer extend them."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class LeaseEnds:
    """While the database is away, no gateway can extend its leases, so the end of one shows nothing then.

    A lease that ended after the last answer before an outage is over if it is still not extended ``lease_s``
    seconds after the last query that failed here. ``clock`` is monotonic seconds, ``unix_time`` Unix seconds.
    """

    lease_s: float
    clock: Callable[[], float]
    unix_time: Callable[[], float]

    def __post_init__(self) -> None:
        self._answered_at = self._away_since = self.unix_time()
        self._unsure_until = float("-inf")

    def answered(self, asked_at: float) -> None:
        """Note that the database has answered a query of that Unix time."""
        self._answered_at = asked_at

    def query_failed(self) -> None:
        now = self.clock()
        if now >= self._unsure_until:
            self._away_since = self._answered_at
        self._unsure_until = now + self.lease_s

    def over_before(self) -> float:
        """Return the Unix time before which a lease must have ended to be over."""
        now = self.unix_time()
        return min(now, self._away_since) if self.clock() < self._unsure_until else now
