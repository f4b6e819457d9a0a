"""The queue in front of one backend. Sans I/O: every method takes the time. Order of service:

1. The higher class first; a request that has waited ``aging_s`` moves up a class, so that none starves.
2. Inside a class start-time fair queuing among tenants, in tokens (Goyal et al. 1996): the tenant that was
   served less comes first. A tenant with long prompts gets fewer of them served, not more of the engine.
3. Inside a tenant the earliest deadline first; then requests without a deadline, in order of arrival.

Removal is lazy: dead entries are swept before they outnumber the live ones, so that memory stays bounded.
"""

import heapq
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import Struct

# Tenants without a waiting request whose next turns are stored; the least recently used is evicted.
MAX_AWAY = 1_000
# Tokens by which a tenant with little use may be ahead of one with much: about 25 usual requests. The tenant
# is served at once, but cannot save up for a burst that would block the others for long.
CREDIT = 50_000
# Sweep when the dead entries outnumber the live ones by this many.
SWEEP_FROM = 64

NEVER = float("inf")

_Turn = tuple[int, int, str]  # virtual time, order of entry, tenant
# The classes of priority, ascending.
RANKS = (-1, 0, 1)


class Waiting(Struct, eq=False):
    """One queued request.

    ``number`` is its order of arrival, ``rank`` its class now (raised by aging), ``cost`` its tokens of
    service (uncached input, output counted twice); ``tokens`` and ``size_bytes`` count against the queue's
    bounds.
    """

    number: int
    tenant: str
    rank: int
    cost: int
    tokens: int
    size_bytes: int
    arrived_at: float
    leave_at: float
    deadline: float | None = None
    heap_entry: int = 0  # its live entry in the heaps; 0: none


@dataclass(slots=True)
class _Tenant:
    """One tenant's requests of one class, earliest deadline first, and the virtual time of its next turn."""

    turn: _Turn
    heap: list[tuple[float, int, int, Waiting]] = field(default_factory=list)
    living: int = 0

    def sweep(self) -> None:
        if len(self.heap) > SWEEP_FROM + 2 * self.living:
            self.heap = [entry for entry in self.heap if entry[2] == entry[3].heap_entry]
            heapq.heapify(self.heap)

    def head(self) -> Waiting:
        """The first live entry; there is one while ``living`` is above 0."""
        while self.heap[0][2] != self.heap[0][3].heap_entry:
            heapq.heappop(self.heap)
        return self.heap[0][3]


class _Class:
    """The tenants with requests of one priority, in turn.

    A tenant's next turn is at the virtual time at which its last one began plus what that cost, in tokens,
    and never before the time of the turn last served: being idle earns nothing.
    """

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant] = {}
        self.living = 0
        self._turns: list[_Turn] = []  # the tenants' next turns, sorted
        self._time = 0
        self._entries = 0
        self._cost = 0  # tokens of all live requests
        # Next turns of tenants without a waiting request that are ahead of the class's time.
        self._away: OrderedDict[str, int] = OrderedDict()

    def add(self, item: Waiting) -> None:
        tenant = self.tenants.get(item.tenant)
        if tenant is None:
            at = max(self._time - CREDIT, self._away.pop(item.tenant, 0))
            tenant = self.tenants[item.tenant] = _Tenant(self._enter(at, item.tenant))
        deadline = NEVER if item.deadline is None else item.deadline
        heapq.heappush(tenant.heap, (deadline, item.number, item.heap_entry, item))
        tenant.living += 1
        self.living += 1
        self._cost += item.cost

    def discard(self, item: Waiting) -> None:
        tenant = self.tenants[item.tenant]
        tenant.living -= 1
        self.living -= 1
        self._cost -= item.cost
        tenant.sweep()
        if not tenant.living:
            del self.tenants[item.tenant]
            self._turns.remove(tenant.turn)
            if tenant.turn[0] > self._time - CREDIT:
                self._away[item.tenant] = tenant.turn[0]
                if len(self._away) > MAX_AWAY:
                    self._away.popitem(last=False)

    def next(self) -> Waiting:
        """The next request; repeated calls return the same one until something changes."""
        return self.tenants[self._turns[0][2]].head()

    def served(self, item: Waiting) -> None:
        """Move the tenant's next turn by the request's cost."""
        tenant = self.tenants[item.tenant]
        at = tenant.turn[0]
        self._time = max(self._time, at)
        self._turns.remove(tenant.turn)
        tenant.turn = self._enter(at + item.cost, item.tenant)
        self.discard(item)

    def count_served_directly(self, item: Waiting) -> None:
        """Count a request served past the empty class: the effect of :meth:`add` and :meth:`served`."""
        at = max(self._time - CREDIT, self._away.pop(item.tenant, 0))
        self._time = max(self._time, at)
        if at + item.cost > self._time - CREDIT:
            self._away[item.tenant] = at + item.cost
            if len(self._away) > MAX_AWAY:
                self._away.popitem(last=False)

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


class FairQueue:
    """All requests that wait for one backend; ``aging_s`` 0 turns aging off."""

    def __init__(self, *, aging_s: float) -> None:
        self._aging_s = aging_s
        self._top = RANKS[-1]
        self._classes = {rank: _Class() for rank in RANKS}
        self._order = RANKS[::-1]
        self._leaving: list[tuple[float, int, int, Waiting]] = []
        self._aging: list[tuple[float, int, int, Waiting]] = []
        self._heap_entries = 0
        self._living: dict[int, Waiting] = {}
        self.tokens = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._living)

    def __iter__(self) -> Iterator[Waiting]:
        """The waiting requests, in order of arrival."""
        return iter(self._living.values())

    def join(self, item: Waiting) -> None:
        item.rank = min(max(item.rank, self._order[-1]), self._top)
        self._living[item.number] = item
        self.tokens += item.tokens
        self.size_bytes += item.size_bytes
        self._enter(item, item.arrived_at)
        self._push(self._leaving, item.leave_at, item)

    def leave(self, item: Waiting) -> None:
        """Remove a request that was not served: cancelled, expired, displaced."""
        self._classes[item.rank].discard(item)
        self._forget(item)

    def peek(self) -> Waiting | None:
        for rank in self._order:
            found = self._classes[rank]
            if found.living:
                return found.next()
        return None

    def serve(self, item: Waiting) -> None:
        """Remove the request that :meth:`peek` returned: it is handed on."""
        self._classes[item.rank].served(item)
        self._forget(item)

    def count_served_directly(self, item: Waiting) -> None:
        """Count a request that is handed on past the empty queue in its tenant's share."""
        item.rank = min(max(item.rank, self._order[-1]), self._top)
        self._classes[item.rank].count_served_directly(item)

    def age(self, now: float) -> None:
        """Raise each request that has waited long enough by one class."""
        while self._aging and self._aging[0][0] <= now:
            _, _, heap_entry, item = heapq.heappop(self._aging)
            if heap_entry == item.heap_entry and item.rank < self._top:
                self._classes[item.rank].discard(item)
                item.rank += 1
                self._enter(item, now)
                self._push(self._leaving, item.leave_at, item)

    def expired(self, now: float) -> list[Waiting]:
        """Remove and return the requests whose ``leave_at`` has passed."""
        out = []
        while self._leaving and self._leaving[0][0] <= now:
            _, _, heap_entry, item = heapq.heappop(self._leaving)
            if heap_entry == item.heap_entry:
                self.leave(item)
                out.append(item)
        return out

    def next_change(self) -> float | None:
        """When :meth:`expired` or :meth:`age` will next have something to do."""
        times = []
        for heap in (self._leaving, self._aging):
            while heap and heap[0][2] != heap[0][3].heap_entry:
                heapq.heappop(heap)
            if heap:
                times.append(heap[0][0])
        return min(times, default=None)

    def least(self) -> Waiting | None:
        """The request to displace first: the newest of the lowest class."""
        for rank in reversed(self._order):
            if self._classes[rank].living:
                return next(item for item in reversed(self._living.values()) if item.rank == rank)
        return None

    def ahead_of(self, tenant: str, rank: int) -> int:
        """Approximate number of requests served before a new one of that tenant and class."""
        rank = min(max(rank, self._order[-1]), self._top)
        above = sum(found.living for other, found in self._classes.items() if other > rank)
        return above + self._classes[rank].ahead_of(tenant)

    def counts(self) -> dict[tuple[int, str], int]:
        """Number of waiting requests by class and tenant."""
        return {
            (rank, name): tenant.living
            for rank, found in self._classes.items()
            for name, tenant in found.tenants.items()
        }

    def _enter(self, item: Waiting, now: float) -> None:
        self._heap_entries += 1
        item.heap_entry = self._heap_entries
        self._classes[item.rank].add(item)
        if self._aging_s > 0 and item.rank < self._top:
            self._push(self._aging, now + self._aging_s, item)

    def _push(self, heap: list[tuple[float, int, int, Waiting]], at: float, item: Waiting) -> None:
        if at == NEVER:
            return
        heapq.heappush(heap, (at, item.number, item.heap_entry, item))
        if len(heap) > SWEEP_FROM + 2 * len(self._living):
            heap[:] = [entry for entry in heap if entry[2] == entry[3].heap_entry]
            heapq.heapify(heap)

    def _forget(self, item: Waiting) -> None:
        item.heap_entry = 0
        del self._living[item.number]
        self.tokens -= item.tokens
        self.size_bytes -= item.size_bytes
