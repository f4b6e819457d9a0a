"""Decides which adapters one engine holds; the caller loads and unloads them. Sans I/O.

An adapter in use or pinned is never evicted; of the others, that with the least demand is first, among equals
the longest idle. A failed load is not retried at once, so that one broken adapter does not delay the others.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

# The demand of the last ten minutes predicts that of the next ten; daily patterns change more slowly.
HALF_LIFE_S = 600.0
MAX_NAMES = 10_000  # names with a count; those with the least demand are evicted
_LEAST = 0.001  # a lower count is dropped: this is about one request ten half-lives ago


class AdapterDemand:
    """Decaying request counts by name; the caller gives the time."""

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self.half_life_s = half_life_s
        self._counts: dict[str, tuple[float, float]] = {}  # value, and the time of that value

    def touch(self, name: str, now: float) -> None:
        self._counts[name] = (self.of(name, now) + 1.0, now)
        if len(self._counts) > MAX_NAMES:
            self._forget(now)

    def of(self, name: str, now: float) -> float:
        """The demand of ``name``; 0 before its first request."""
        value, at = self._counts.get(name, (0.0, now))
        return value * math.exp2(-max(0.0, now - at) / self.half_life_s)

    def most_demanded(self, names: Iterable[str], now: float) -> list[str]:
        """The names with demand, the highest first; names with equal demand in alphabetical order."""
        demanded = [(self.of(name, now), name) for name in names if name in self._counts]
        return [
            name for value, name in sorted(demanded, key=lambda one: (-one[0], one[1])) if value >= _LEAST
        ]

    def snapshot(self, now: float) -> Mapping[str, float]:
        """The counts worth storing."""
        return {name: value for name in self._counts if (value := self.of(name, now)) >= _LEAST}

    def restore(self, stored: Mapping[str, float], now: float, *, age_s: float = 0.0) -> None:
        """Restore counts stored ``age_s`` seconds ago; a higher current count stays."""
        decay = math.exp2(-max(0.0, age_s) / self.half_life_s)
        for name, value in stored.items():
            left = value * decay
            if left >= _LEAST and left > self.of(name, now) and len(self._counts) < MAX_NAMES:
                self._counts[name] = (left, now)

    def _forget(self, now: float) -> None:
        keep = self.most_demanded(self._counts, now)[: MAX_NAMES // 2]
        self._counts = {name: self._counts[name] for name in keep}


# A broken folder is retried after one second, then two, at most a minute: an operator who repairs it does not
# wait long, and constant requests for its adapter cost an engine one read a minute.
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Load the adapter, after ``evict`` (if any) has been unloaded."""

    evict: str | None = None


@dataclass(frozen=True, slots=True)
class Full:
    """No place can be freed now; ``pinned`` is the number of places with pinned adapters."""

    pinned: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A recent load of the adapter has failed."""

    reason: str
    retry_after_s: float


Decision = LoadDecision | Full | Broken


@dataclass(slots=True)
class _Failure:
    reason: str
    wait_s: float
    until: float


class Residency:
    """At most ``places`` adapters of one engine; engines may share ``demand``.

    A resident adapter is one that requests may use at once; ``held`` are the adapters that the engine reports
    as loaded, which may be more: a load whose caller was cancelled continues.
    """

    def __init__(self, places: int, demand: AdapterDemand | None = None) -> None:
        self.places = places
        self.demand = demand if demand is not None else AdapterDemand()
        self._resident: dict[str, str] = {}  # folder by name
        self._users: dict[str, int] = {}
        self._used_at: dict[str, float] = {}
        self._failures: dict[str, _Failure] = {}
        self.pinned: frozenset[str] = frozenset()

    @property
    def resident(self) -> tuple[str, ...]:
        return tuple(self._resident)

    @property
    def in_use(self) -> tuple[str, ...]:
        """Adapters that requests use or wait for."""
        return tuple(self._users)

    def pin(self, names: Iterable[str]) -> None:
        """Set the adapters that are never evicted once loaded."""
        self.pinned = frozenset(names)

    def enter(self, name: str, now: float) -> None:
        """Count a request that begins to need the adapter."""
        self._users[name] = self._users.get(name, 0) + 1
        self._used_at[name] = now
        self.demand.touch(name, now)

    def leave(self, name: str, now: float) -> None:
        """Count a request that no longer needs the adapter."""
        self._used_at[name] = now
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            if name not in self._resident:
                self._used_at.pop(name, None)

    def is_ready(self, name: str, folder: str) -> bool:
        """Whether requests may use the adapter at once, with the weights of that folder."""
        return self._resident.get(name) == folder

    def decide(self, name: str, folder: str, held: Collection[str], now: float) -> Decision | None:
        """What to do for a request; ``None``: the adapter is ready."""
        if self.is_ready(name, folder):
            return None
        failure = self._failures.get(name)
        if failure is not None and now < failure.until:
            return Broken(failure.reason, failure.until - now)
        if name in held or len(held) < self.places:
            return LoadDecision()
        victim = self.victim(held, now)
        if victim is None:
            return Full(len(self.pinned & set(held)))
        return LoadDecision(victim)

    def victim(self, held: Collection[str], now: float) -> str | None:
        """The adapter to evict: one not resident, else the idle unpinned one with the least demand."""
        free = [name for name in held if name not in self._users and name not in self.pinned]
        orphans = [name for name in free if name not in self._resident]
        if orphans:
            return orphans[0]
        return min(
            free, key=lambda one: (self.demand.of(one, now), self._used_at.get(one, 0.0)), default=None
        )

    def loaded(self, name: str, folder: str, now: float) -> None:
        self._resident[name] = folder
        self._used_at.setdefault(name, now)
        self._failures.pop(name, None)

    def failed(self, name: str, reason: str, now: float) -> float:
        """Record that the engine could not load the adapter; returns the seconds until a retry."""
        before = self._failures.get(name)
        wait_s = FIRST_WAIT_S if before is None else min(LONGEST_WAIT_S, 2 * before.wait_s)
        self._failures[name] = _Failure(reason, wait_s, now + wait_s)
        return wait_s

    def unloaded(self, name: str) -> None:
        """Record that the engine has unloaded the adapter, or is about to."""
        self._resident.pop(name, None)
        if name not in self._users:
            self._used_at.pop(name, None)

    def retry(self, name: str) -> None:
        """Forget an earlier failure: the adapter has changed."""
        self._failures.pop(name, None)

    def wanted(self, known: Collection[str], now: float) -> tuple[str, ...]:
        """Adapters worth loading, at most ``places``: the pinned ones, then those with the most demand."""
        pinned = sorted(self.pinned & set(known))
        demanded = [name for name in self.demand.most_demanded(known, now) if name not in self.pinned]
        return tuple([*pinned, *demanded][: self.places])

    def next_load(self, known: Collection[str], held: Collection[str], now: float) -> str | None:
        """The adapter to preload: a pinned one, or one with demand while a place is free."""
        for name in self.wanted(known, now):
            failure = self._failures.get(name)
            if name in self._resident or (failure is not None and now < failure.until):
                continue
            if len(held) < self.places:
                return name
            if name in self.pinned and self.victim(held, now) is not None:
                return name
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError when the bookkeeping contradicts itself."""
        assert len(self._resident) <= self.places, "more residents than places"
        assert all(count > 0 for count in self._users.values()), "a user that is none"
        assert self._used_at.keys() >= self._resident.keys(), "a resident without a time"
