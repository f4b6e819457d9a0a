"""Which connections a process keeps when there are too many: decisions without I/O."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.contracts.addresses import Network, source_of
from gateway.errors import PublicError

MAX_CONNECTIONS: Final = 4_096
"""Connections at once unless configured. An idle one is about 20 KB, so some 80 MB."""
RESERVE: Final = 64
"""Connections above the limits, on which probes alone are answered."""
PROBES: Final = frozenset({b"/ping", b"/health", b"/ready"})

_TOO_MANY: Final = PublicError(503, "queue_full", "there are too many connections", retry_after_ms=1_000)
_TOO_MANY_OF_ADDRESS: Final = PublicError(
    429, "rate_limited", "there are too many connections from this address", retry_after_ms=1_000
)


class Closable(Protocol):
    """A connection."""

    def give_way(self) -> None:
        """Close at once: another connection takes its place."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of open connections.

    Args:
        total: of the process.
        per_address: of one IPv4 address or IPv6 /64; ``None``: half of ``total``.
        proxies: addresses without a bound of their own: each speaks for many callers.
    """

    total: int = MAX_CONNECTIONS
    per_address: int | None = None
    proxies: Sequence[Network] = ()


class ConnectionTable:
    """The open connections, and which of them give way to new ones.

    A connection beyond the total takes the place of one without a request in progress: first of those that
    never completed a request's headers, then of the other idle ones, the oldest first. Where there is none,
    or the address has too many, it is one of ``RESERVE`` connections, which answer probes alone.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._total = limits.total
        self._per_address = limits.per_address or max(1, limits.total // 2)
        self._proxies = limits.proxies
        self._sources: dict[Closable, str] = {}
        self._of_source: Counter[str] = Counter()
        self._reserve: dict[Closable, None] = {}
        # In the order of their time; a dictionary is an ordered set.
        self.unused: dict[Closable, None] = {}
        self.idle: dict[Closable, None] = {}

    def open(self, connection: Closable, address: str) -> PublicError | None:
        """Add a connection; returns what it answers to all but probes, ``None`` for an ordinary one."""
        source = source_of(address, self._proxies)
        refusal = None
        if source and self._of_source[source] >= self._per_address:
            refusal = _TOO_MANY_OF_ADDRESS
        elif len(self._sources) - len(self._reserve) >= self._total and not self._evict():
            refusal = _TOO_MANY
        self._sources[connection] = source
        self._of_source[source] += 1
        if refusal is None:
            self.unused[connection] = None
            return None
        if len(self._reserve) >= RESERVE:
            self._give_way(next(iter(self._reserve)))
        self._reserve[connection] = None
        return refusal

    def close(self, connection: Closable) -> None:
        """Remove a connection; without effect on one that was removed before."""
        source = self._sources.pop(connection, None)
        if source is None:
            return
        self._of_source[source] -= 1
        if not self._of_source[source]:
            del self._of_source[source]
        for group in (self._reserve, self.unused, self.idle):
            group.pop(connection, None)

    def __len__(self) -> int:
        return len(self._sources)

    def _evict(self) -> bool:
        for group in (self.unused, self.idle):
            for connection in group:
                self._give_way(connection)
                return True
        return False

    def _give_way(self, connection: Closable) -> None:
        self.close(connection)
        connection.give_way()
