"""Decides which connections a process keeps if there are too many; sans-I/O."""

from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from gateway.contracts.addresses import Network, source_of
from gateway.errors import PublicError

MAX_CONNECTIONS: Final = 4_096
"""Default limit of open connections. An idle one takes about 20 KB, so all take some 80 MB."""
RESERVE: Final = 64  # most connections above the limits; only probes are answered on these
PROBES: Final = frozenset({b"/ping", b"/health", b"/ready"})

_TOO_MANY: Final = PublicError(503, "queue_full", "there are too many connections", retry_after_ms=1_000)
_TOO_MANY_OF_ADDRESS: Final = PublicError(
    429, "rate_limited", "there are too many connections from this address", retry_after_ms=1_000
)


class Closable(Protocol):
    """A connection."""

    def give_way(self) -> None:
        """Close at once: another connection takes its place."""


class ConnectionTable:
    """The open connections, and the choice of those that are closed for new ones.

    A connection beyond the total replaces one without a request in progress: first one that never completed
    a request's headers, then another idle one, each time the oldest. If there is none, or the address has too
    many connections, the new one is among the ``RESERVE`` connections, on which only probes are answered.

    Args:
        total: most connections of the process.
        per_address: most connections of one IPv4 address or IPv6 /64; ``None``: half of ``total``.
        proxies: addresses without their own bound, because each forwards the requests of many callers.
    """

    def __init__(
        self,
        total: int = MAX_CONNECTIONS,
        per_address: int | None = None,
        proxies: Sequence[Network] = (),
    ) -> None:
        self._total = total
        self._per_address = per_address or max(1, total // 2)
        self._proxies = proxies
        self._sources: dict[Closable, str] = {}
        self._of_source: Counter[str] = Counter()
        self._reserve: dict[Closable, None] = {}
        # Whether each connection ends after the answer to its next request.
        self.ending = False
        # Oldest first; the dictionaries are used as ordered sets.
        self.unused: dict[Closable, None] = {}
        self.idle: dict[Closable, None] = {}

    def open(self, connection: Closable, address: str) -> PublicError | None:
        """Add a connection; return the error for all requests but probes, or ``None`` if it is served."""
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
