"""Leases in the ledger's database: by which clock they are stored, and which are over."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

# Of the statement, not of each row, so that an index serves the comparison.
_CLOCK: Final = sa.cast(sa.extract("epoch", sa.func.statement_timestamp()), sa.Double)


class LeaseClock:
    """Converts ends of leases between the clocks of this gateway, in Unix seconds, and of the database.

    Leases are stored by PostgreSQL's clock, because those of several machines differ. The gateways on a
    SQLite file are on one machine, so theirs is used as it is.
    """

    def __init__(self, url: str, unix_time: Callable[[], float]) -> None:
        self._unix_time = unix_time
        self._shared = url.startswith("postgresql")

    def stored(self, at: float | None) -> Any:
        """What to store, or to compare with stored ends, for a time of this gateway's clock."""
        if at is None or not self._shared:
            return at
        return _CLOCK + sa.literal(at - self._unix_time(), sa.Double)

    def own(self, end: sa.Column[Any]) -> sa.ColumnElement[Any]:
        """A column of stored ends, by this gateway's clock."""
        if not self._shared:
            return end
        now = sa.bindparam(None, callable_=self._unix_time, type_=sa.Double)
        return (end - _CLOCK + now).label(end.name)


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
