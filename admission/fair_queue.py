"""The queue in front of one backend. Sans I/O: every method takes the time. Order of service:

1. The higher class first; a request that has waited ``aging_s`` moves up a class, so that none starves.
2. Inside a class start-time fair queuing among tenants, in tokens (Goyal et al. 1996): the tenant that was
   served less comes first. A tenant with long prompts gets fewer of them served, not more of the engine.
3. Inside a tenant the earliest deadline first; then requests without a deadline, in order of arrival.

Removal is lazy: dead entries are swept before they outnumber the live ones, so that memory stays bounded.
"""

import heapq
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec import Struct

# Tenants without a waiting request whose next turns are stored; the least recently used is evicted.
MAX_AWAY = 1_000
# Tokens by which a tenant with little use may be ahead of one with much: about 25 usual requests. The tenant
# is served at once, but cannot save up for a burst that would block the others for long.
CREDIT = 50_000
SWEEP_FROM = 64  # sweep when the dead entries outnumber the live ones by this many

NEVER = float("inf")

_Turn = tuple[int, int, str]  # virtual time, order of entry, tenant
RANKS = (-1, 0, 1)  # the classes of priority, ascending


class Waiting(Struct, eq=False):
    """One queued request.

    ``number`` is its order of arrival, ``rank`` its class now (raised by aging), ``cost`` its tokens of
    service (uncached input, output counted twice); ``uncached``, the prompt tokens that the engine must
    compute, and ``size_bytes`` count against the queue's bounds. ``deadline`` is when its first token is due.
    """

    number: int
    tenant: str
    rank: int
    cost: int
    uncached: int
    size_bytes: int
    arrived_at: float
    leave_at: float
    deadline: float | None = None
    # What its entries in the heaps share: itself, or nothing once it has left or has newer entries, so that a
    # dead entry keeps no request in memory.
    entry: list[Any] = []


W = TypeVar("W", bound=Waiting)


class _Heap(list[tuple[float, int, list[W]]]):
    """Requests by a time."""

    def push(self, at: float, item: W, living: int) -> None:
        heapq.heappush(self, (at, item.number, item.entry))
        if len(self) > SWEEP_FROM + 2 * living:
            self[:] = [entry for entry in self if entry[2]]
            heapq.heapify(self)

    def first(self) -> tuple[float, W] | None:
        """The first request that waits, and its time."""
        while self and not self[0][2]:
            heapq.heappop(self)
        return (self[0][0], self[0][2][0]) if self else None

    def due(self, now: float) -> Iterator[W]:
        """Remove and return the requests whose time has come."""
        while (found := self.first()) is not None and found[0] <= now:
            heapq.heappop(self)
            yield found[1]


@dataclass(slots=True)
class _Tenant(Generic[W]):
    """One tenant's requests of one class, earliest deadline first, and the virtual time of its next turn."""

    turn: _Turn
    heap: _Heap[W] = field(default_factory=_Heap)
    living: int = 0


class _Class(Generic[W]):
    """The tenants with requests of one priority, in turn.

    A tenant's next turn is at the virtual time at which its last one began plus what that cost, in tokens,
    and never before the time of the turn last served: being idle earns nothing.
    """

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant[W]] = {}
        self.living = 0
        self._turns: list[_Turn] = []  # the tenants' next turns, sorted
        self._time = 0
        self._entries = 0
        self._cost = 0  # tokens of all live requests
        # Next turns of tenants without a waiting request that are ahead of the class's time.
        self._away: dict[str, int] = {}

    def add(self, item: W) -> None:
        tenant = self.tenants.get(item.tenant)
        if tenant is None:
            at = max(self._time - CREDIT, self._away.pop(item.tenant, 0))
            tenant = self.tenants[item.tenant] = _Tenant(self._enter(at, item.tenant))
        deadline = NEVER if item.deadline is None else item.deadline
        tenant.living += 1
        tenant.heap.push(deadline, item, tenant.living)
        self.living += 1
        self._cost += item.cost

    def discard(self, item: W) -> None:
        tenant = self.tenants[item.tenant]
        tenant.living -= 1
        self.living -= 1
        self._cost -= item.cost
        if not tenant.living:
            del self.tenants[item.tenant]
            self._turns.remove(tenant.turn)
            self._went(item.tenant, tenant.turn[0])

    def next(self) -> W:
        """The next request; repeated calls return the same one until something changes."""
        found = self.tenants[self._turns[0][2]].heap.first()
        assert found is not None, "a tenant without a waiting request has no turn"
        return found[1]

    def served(self, item: W) -> None:
        """Move the tenant's next turn by the request's cost."""
        tenant = self.tenants[item.tenant]
        at = tenant.turn[0]
        self._time = max(self._time, at)
        self._turns.remove(tenant.turn)
        tenant.turn = self._enter(at + item.cost, item.tenant)
        self.discard(item)

    def count_served_directly(self, item: W) -> None:
        """Count a request served past the empty class: the effect of :meth:`add` and :meth:`served`."""
        at, least = self._away.pop(item.tenant, 0), self._time - CREDIT
        if at < least:
            at = least
        elif at > self._time:
            self._time = at
        self._went(item.tenant, at + item.cost)

    def _went(self, name: str, turn: int) -> None:
        """Store the next turn of a tenant without a waiting request, if it is ahead of the class's time."""
        if turn > self._time - CREDIT:
            self._away[name] = turn
            if len(self._away) > MAX_AWAY:
                del self._away[next(iter(self._away))]

    def ahead_of(self, name: str) -> int:
        if not self.living:
            return 0
        tenant = self.tenants.get(name)
        own = tenant.living if tenant is not None else 0
        at = tenant.turn[0] if tenant is not None else max(self._time - CREDIT, self._away.get(name, 0))
        at += own * self._cost // self.living
        before = bisect_right(self._turns, (at, self._entries + 1, "")) - (tenant is not None)
        return own + min(self.living - own, (own + 1) * before)

    def _enter(self, at: int, name: str) -> _Turn:
        self._entries += 1
        turn = (at, self._entries, name)
        insort(self._turns, turn)
        return turn


class FairQueue(Generic[W]):
    """All requests that wait for one backend; ``aging_s`` 0 turns aging off.

    ``waiting`` are the requests by number, in order of arrival; ``tokens`` and ``size_bytes`` their sums.
    """

    def __init__(self, *, aging_s: float) -> None:
        self._aging_s = aging_s
        self._classes: dict[int, _Class[W]] = {rank: _Class() for rank in reversed(RANKS)}
        self._leaving: _Heap[W] = _Heap()
        self._aging: _Heap[W] = _Heap()
        self.waiting: dict[int, W] = {}
        self.tokens = 0
        self.size_bytes = 0

    def join(self, item: W) -> None:
        item.rank = min(max(item.rank, RANKS[0]), RANKS[-1])
        self.waiting[item.number] = item
        self.tokens += item.uncached
        self.size_bytes += item.size_bytes
        self._enter(item, item.arrived_at)

    def leave(self, item: W) -> None:
        """Remove a request that was not served: cancelled, expired, displaced."""
        self._classes[item.rank].discard(item)
        self._forget(item)

    def peek(self) -> W | None:
        for found in self._classes.values():
            if found.living:
                return found.next()
        return None

    def serve(self, item: W) -> None:
        """Remove the request that :meth:`peek` returned: it is handed on."""
        self._classes[item.rank].served(item)
        self._forget(item)

    def count_served_directly(self, item: W) -> None:
        """Count a request that is handed on past the empty queue in its tenant's share."""
        if item.rank not in self._classes:
            item.rank = min(max(item.rank, RANKS[0]), RANKS[-1])
        self._classes[item.rank].count_served_directly(item)

    def age(self, now: float) -> None:
        """Raise each request that has waited long enough by one class."""
        for item in self._aging.due(now):
            self._classes[item.rank].discard(item)
            item.rank += 1
            self._enter(item, now)

    def expired(self, now: float) -> list[W]:
        """Remove and return the requests whose ``leave_at`` has passed."""
        out = list(self._leaving.due(now))
        for item in out:
            self.leave(item)
        return out

    def next_change(self) -> float | None:
        """When :meth:`expired` or :meth:`age` will next have something to do."""
        firsts = (self._leaving.first(), self._aging.first())
        return min((found[0] for found in firsts if found is not None), default=None)

    def least(self) -> W | None:
        """The request to displace first: the newest of the lowest class."""
        for rank in RANKS:
            if self._classes[rank].living:
                return next(item for item in reversed(self.waiting.values()) if item.rank == rank)
        return None

    def ahead_of(self, tenant: str, rank: int) -> int:
        """Approximate number of requests served before a new one of that tenant and class."""
        rank = min(max(rank, RANKS[0]), RANKS[-1])
        above = sum(found.living for other, found in self._classes.items() if other > rank)
        return above + self._classes[rank].ahead_of(tenant)

    def counts(self) -> dict[tuple[int, str], int]:
        """Number of waiting requests by class and tenant."""
        return {
            (rank, name): tenant.living
            for rank, found in self._classes.items()
            for name, tenant in found.tenants.items()
        }

    def _enter(self, item: W, now: float) -> None:
        item.entry.clear()
        item.entry = [item]
        self._classes[item.rank].add(item)
        if self._aging_s > 0 and item.rank < RANKS[-1]:
            self._aging.push(now + self._aging_s, item, len(self.waiting))
        if item.leave_at != NEVER:
            self._leaving.push(item.leave_at, item, len(self.waiting))

    def _forget(self, item: W) -> None:
        item.entry.clear()
        del self.waiting[item.number]
        self.tokens -= item.uncached
        self.size_bytes -= item.size_bytes
