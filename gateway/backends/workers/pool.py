"""The workers of one model: the sum of their load, and the choice of a worker for a request; sans-I/O.

In a pool of at most ``WHOLE_UP_TO`` workers each request examines every worker. With a thousand workers that
would cost milliseconds (``docs/fleet-simulation.md``), so in a larger pool

* the pool's sums are computed every ``MAX_SNAPSHOT_AGE_S``, and our own requests are added to them in
  between;
* a request is placed among a shortlist: the workers that last got its prefix or its adapter, the first ones
  on the ring, and a few drawn at random, so that load decides almost as among all (the best of a few random
  choices is nearly the best of all: Mitzenmacher 2001).
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from admission.values import BackendLoad
from gateway.backends.workers.health import WorkerHealth, WorkerState
from gateway.backends.workers.load import WorkerLoad, own_load, pool_load
from gateway.backends.workers.shortlist import Hints
from gateway.backends.workers.worker_choice import WorkerChoice, WorkerPreference, WorkerView

# Examining all of so many workers costs about as much as a shortlist (docs/fleet-simulation.md).
WHOLE_UP_TO = 32
# Longest age of a large pool's sums, seconds: less than the time between two scrapes of a worker.
MAX_SNAPSHOT_AGE_S = 0.25
# The shortlist: workers from the ring and workers drawn at random, in addition to the hints.
NEAR, DRAWN = 4, 8


class Member(Protocol):
    """What the pool needs of a worker."""

    url: str
    load: WorkerLoad
    health: WorkerHealth

    def view(self, now: float) -> WorkerView:
        """The worker's figures for :class:`WorkerChoice`."""


M = TypeVar("M", bound=Member)
IN_SERVICE = WorkerState.IN_SERVICE  # as a constant, as in ``gateway.contracts.values``


@dataclass(frozen=True, slots=True)
class _Snapshot(Generic[M]):
    """A large pool at one moment: workers in service, others' requests on them, ours on all workers."""

    at: float
    serving: tuple[M, ...]
    others: float
    weight: float
    load: BackendLoad | None
    in_flight: int


class WorkerPool(Generic[M]):
    """All workers of a pool.

    Args:
        max_running: most sequences of one worker's batch; 0 when unknown.
        random: for the draws of the shortlist.
        whole_up_to: size up to which every worker is examined.
    """

    def __init__(
        self,
        members: Sequence[M],
        choice: WorkerChoice,
        *,
        max_running: int,
        random: random.Random,
        whole_up_to: int = WHOLE_UP_TO,
    ) -> None:
        self._choice = choice
        self._max_running = max_running
        self._random = random
        self._whole_up_to = whole_up_to
        self._resting_until: dict[str, float] = {}
        self.resize(members)
        self._hints = Hints()
        self._in_flight = 0

    def resize(self, members: Sequence[M]) -> None:
        self._members = {member.url: member for member in members}
        self._resting_until = {
            url: until for url, until in self._resting_until.items() if url in self._members
        }
        self._large = len(members) > self._whole_up_to
        self._only = members[0] if len(members) == 1 else None
        self._snapshot: _Snapshot[M] | None = None

    def sent(self, member: M, prompt_tokens: int, preference: WorkerPreference) -> int:
        self._in_flight += 1
        if self._only is None:
            self._choice.sent(member.url, preference)
        if self._large:
            self._hints.sent(member.url, preference.chain, preference.adapter)
        return member.load.sent(prompt_tokens)

    def ended(self, member: M, ticket: int) -> None:
        member.load.ended(ticket)
        self._in_flight -= 1

    def rest(self, member: M, until: float) -> None:
        """Send it no requests of the pool's model before ``until``, as it asked; it stays in service."""
        member.health.resting_until = max(member.health.resting_until, until)
        self._resting_until[member.url] = max(self.resting_until(member), until)

    def resting_until(self, member: M) -> float:
        return self._resting_until.get(member.url, 0.0)

    def rests(self, now: float) -> bool:
        """Whether workers asked for no requests, and no other is in service."""
        return bool(self._resting_until) and not any(
            self._takes_requests(one, now) for one in self._members.values()
        )

    def lost(self, url: str, adapter: str) -> None:
        self._choice.lost(url, adapter)

    def load(self, now: float) -> BackendLoad | None:
        """The load of all workers in service: our own requests alone when no scrape is recent enough.

        ``None`` while none of them is in service, or none was ever scraped.
        """
        if self._only is not None:
            if self._only.health.state is not IN_SERVICE:
                return None
            only = self._only.load
            return only.current(now) or (own_load([only], self._max_running) if only.reports else None)
        if not self._large:
            return self._sum(self._serving(), now)
        snapshot = self._current(now)
        load = snapshot.load
        if load is None or self._in_flight == snapshot.in_flight:
            return load
        # New requests count as running; ended ones are taken off the waiting ones first, as in WorkerLoad.
        more = self._in_flight - snapshot.in_flight
        total = max(0, load.running + load.waiting + more)
        running = min(total, load.running + max(0, more), load.max_running or total)
        return replace(load, running=running, waiting=total - running)

    def pick(self, preference: WorkerPreference, tried: Collection[str], now: float) -> M | None:
        """The worker for a request among those not ``tried``; ``None`` when none of them takes requests."""
        if self._large:
            found = self._pick_of_many(preference, tried, now)
            if found is not None:
                return found
        if self._only is not None:
            return self._only if not tried and self._takes_requests(self._only, now) else None
        serving = [
            one for one in self._members.values() if one.url not in tried and self._takes_requests(one, now)
        ]
        if len(serving) <= 1:
            return serving[0] if serving else None
        name = self._choice.choose(preference, [member.view(now) for member in serving])
        return self._members[name] if name is not None else None

    def _pick_of_many(self, preference: WorkerPreference, tried: Collection[str], now: float) -> M | None:
        snapshot = self._current(now)
        serving, draw, members = snapshot.serving, self._random.random, self._members
        if not serving or not snapshot.weight:
            return None
        names = dict.fromkeys(self._hints.of(preference.chain, preference.adapter))
        names.update(dict.fromkeys(self._choice.near(preference, NEAR)))
        names.update({serving[int(draw() * len(serving))].url: None for _ in range(DRAWN)})
        views = [
            member.view(now)
            for name in names
            if name not in tried and (member := members.get(name)) and self._takes_requests(member, now)
        ]
        share = (snapshot.others + self._in_flight + 1.0) / snapshot.weight
        chosen = self._choice.choose(preference, views, share)
        return members[chosen] if chosen is not None else None

    def _serving(self) -> list[M]:
        return [one for one in self._members.values() if one.health.state is IN_SERVICE]

    def _current(self, now: float) -> _Snapshot[M]:
        snapshot = self._snapshot
        # Without a worker in service the snapshot is not reused: one may return at any moment.
        if snapshot is None or not snapshot.serving or not 0.0 <= now - snapshot.at < MAX_SNAPSHOT_AGE_S:
            serving = self._serving()
            ours = sum([member.load.in_flight for member in serving])
            requests = sum([member.load.requests_and_kv_usage(now)[0] for member in serving])
            snapshot = self._snapshot = _Snapshot(
                at=now,
                serving=tuple(serving),
                others=max(0.0, requests - ours),
                weight=sum([one.health.weight(now) for one in serving if self._takes_requests(one, now)]),
                load=self._sum(serving, now),
                in_flight=self._in_flight,
            )
        return snapshot

    def _sum(self, serving: Sequence[M], now: float) -> BackendLoad | None:
        loads = [member.load for member in serving]
        reported = [load.current(now) for load in loads]
        total = pool_load(reported, [load.in_flight for load in loads], self._max_running)
        return total or own_load(loads, self._max_running)

    def _takes_requests(self, member: M, now: float) -> bool:
        return member.health.state is IN_SERVICE and self._resting_until.get(member.url, 0.0) <= now
