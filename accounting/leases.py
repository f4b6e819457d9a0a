"""Which leases in the ledger's database are over: those of gateways that no longer extend them."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class LeaseEnds:
    """While the database is away or read-only, no gateway can extend its leases, so their ends show nothing.

    A lease that ended then, or up to ``lease_s`` seconds before, is over if it is still not extended
    ``lease_s`` seconds after the last query that failed here. ``clock`` is monotonic seconds, ``unix_time``
    Unix seconds.
    """

    lease_s: float
    clock: Callable[[], float]
    unix_time: Callable[[], float]

    def __post_init__(self) -> None:
        self._answered_at = self._away_since = self.unix_time()
        self._unsure_until = float("-inf")
        self._failing = False

    def answered(self, asked_at: float) -> None:
        """Note that the database has answered a query of that Unix time; it may still be read-only."""
        if not self._failing or self.clock() >= self._unsure_until + self.lease_s:
            self._failing, self._answered_at = False, asked_at

    def query_failed(self) -> None:
        if not self._failing:
            self._failing, self._away_since = True, self._answered_at - self.lease_s
        self._unsure_until = self.clock() + self.lease_s

    def over_before(self) -> float:
        """Return the Unix time before which a lease must have ended to be over."""
        now = self.unix_time()
        return min(now, self._away_since) if self.clock() < self._unsure_until else now
