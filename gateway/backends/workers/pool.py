"""The workers of one pool taken together: their load, and which of them gets a request; sans-I/O.

In a pool of at most ``WHOLE_UP_TO`` every worker is looked at for each request. In a larger one that would
cost the more the more there are (milliseconds with a thousand, ``docs/fleet-simulation.md``), so then

* the pool's sums are made every ``LOOK_S``, and in between our own requests are added to them as they come;
* a request is placed among a shortlist: those that were last sent its beginning or its adapter, the first
  ones on the ring, and a few drawn at random, so that the load decides as among all (the best of a few
  random choices is nearly the best of all: Mitzenmacher 2001).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from admission.values import BackendLoad
from gateway.backends.workers.health import WorkerHealth
from gateway.backends.workers.load import WorkerLoad, pool_load
from gateway.backends.workers.shortlist import Hints
from gateway.backends.workers.worker_choice import Wish, WorkerChoice, WorkerView

# Looking at all of so many costs about as much as a shortlist (docs/fleet-simulation.md).
WHOLE_UP_TO = 32
# Age of the sums of a large pool, seconds: a part of the time between two scrapes of a worker.
LOOK_S = 0.25
# The shortlist: so many from the ring and so many drawn, besides the hints.
NEAR, DRAWN = 4, 8


class Member(Protocol):
    """A worker as its pool sees it."""

    url: str
    load: WorkerLoad
    health: WorkerHealth

    def view(self, now: float) -> WorkerView:
        """How the choice sees it."""


M = TypeVar("M", bound=Member)


@dataclass(frozen=True, slots=True)
class _Look(Generic[M]):
    """A large pool at one moment.

    Args:
        serving: those in service.
        others: requests of others on them, weight: the sum of theirs.
        told: their load together.
        in_flight: our requests on all workers.
    """

    at: float
    serving: tuple[M, ...]
    others: float
    weight: float
    told: BackendLoad | None
    in_flight: int


class WorkerPool(Generic[M]):
    """All workers of a pool.

    Args:
        members: all, in service or not.
        choice: picks among those that it is shown.
        max_running: most sequences of one worker's batch; 0 when unknown.
        random: draws of the shortlist.
        whole_up_to: size up to which every worker is looked at.
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
        self._members = {member.url: member for member in members}
        self._choice = choice
        self._max_running = max_running
        self._random = random
        self._large = len(members) > whole_up_to
        self._hints = Hints()
        self._in_flight = 0
        self._look: _Look[M] | None = None

    def sent(self, member: M, prompt_tokens: int, wish: Wish) -> int:
        """A request goes there; the ticket takes it back."""
        self._in_flight += 1
        self._choice.sent(member.url, wish)
        if self._large:
            self._hints.sent(member.url, wish.chain, wish.adapter)
        return member.load.sent(prompt_tokens)

    def ended(self, member: M, ticket: int) -> None:
        """It has ended, in whatever way. Raises KeyError for a ticket that is not out."""
        member.load.ended(ticket)
        self._in_flight -= 1

    def lost(self, url: str, adapter: str) -> None:
        """The worker does not know that adapter."""
        self._choice.lost(url, adapter)

    def load(self, now: float) -> BackendLoad | None:
        """Those in service together; ``None`` while none of them told anything that can be believed."""
        if not self._large:
            return self._sum(self._serving(), now)
        look = self._looked(now)
        told = look.told
        if told is None or self._in_flight == look.in_flight:
            return told
        # What has come since runs, what has gone leaves the queues first: as a worker's own load has it.
        more = self._in_flight - look.in_flight
        total = max(0, told.running + told.waiting + more)
        running = min(total, told.running + max(0, more), told.max_running or total)
        return replace(told, running=running, waiting=total - running)

    def pick(self, wish: Wish, tried: Collection[str], now: float) -> M | None:
        """The worker for a request among those not ``tried``; ``None`` when no other is in service."""
        if self._large:
            found = self._pick_of_many(wish, tried, now)
            if found is not None:
                return found
        serving = [member for member in self._serving() if member.url not in tried]
        if len(serving) <= 1:
            return serving[0] if serving else None
        name = self._choice.choose(wish, [member.view(now) for member in serving])
        return self._members[name] if name is not None else None

    def _pick_of_many(self, wish: Wish, tried: Collection[str], now: float) -> M | None:
        look = self._looked(now)
        serving, draw, members = look.serving, self._random.random, self._members
        if not serving or not look.weight:
            return None
        names = dict.fromkeys(self._hints.of(wish.chain, wish.adapter))
        names.update(dict.fromkeys(self._choice.near(wish, NEAR)))
        names.update({serving[int(draw() * len(serving))].url: None for _ in range(DRAWN)})
        views = [
            member.view(now)
            for name in names
            if name not in tried and (member := members[name]).health.in_service
        ]
        share = (look.others + self._in_flight + 1.0) / look.weight
        chosen = self._choice.choose(wish, views, share)
        return members[chosen] if chosen is not None else None

    def _serving(self) -> list[M]:
        return [member for member in self._members.values() if member.health.in_service]

    def _looked(self, now: float) -> _Look[M]:
        look = self._look
        # With nobody in service the next moment may change that.
        if look is None or not look.serving or not 0.0 <= now - look.at < LOOK_S:
            serving = self._serving()
            ours = sum([member.load.in_flight for member in serving])
            requests = sum([member.load.requests(now) for member in serving])
            look = self._look = _Look(
                at=now,
                serving=tuple(serving),
                others=max(0.0, requests - ours),
                weight=sum([member.health.weight(now) for member in serving]),
                told=self._sum(serving, now),
                in_flight=self._in_flight,
            )
        return look

    def _sum(self, serving: Sequence[M], now: float) -> BackendLoad | None:
        loads = [member.load for member in serving]
        if len(loads) <= 1:
            return loads[0].told(now) if loads else None
        return pool_load(
            [load.told(now) for load in loads], [load.in_flight for load in loads], self._max_running
        )
