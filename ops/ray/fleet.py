"""Which engine replica a call goes to, however many there are; sans-I/O.

Of at most ``WHOLE_UP_TO`` replicas each is looked at for each call. Of more, a shortlist is, made as in a
large pool of remote workers (:mod:`gateway.backends.workers.pool`): those that were last sent the prompt's
beginning or its adapter, the first ones on the ring, and a few drawn at random. The bound on load is the
whole fleet's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from gateway.backends.workers.pool import DRAWN, LOOK_S, NEAR, WHOLE_UP_TO
from gateway.backends.workers.shortlist import Hints
from gateway.backends.workers.worker_choice import Wish, WorkerChoice, WorkerView


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a call may go.

    Args:
        best: the replica to ask first; ``None`` when none serves.
        others: those that were looked at next to it.
        whole: whether these two are all that serve.
    """

    best: str | None
    others: tuple[str, ...]
    whole: bool


class ReplicaFleet:
    """The replicas of one deployment.

    Args:
        choice: picks among those that it is shown.
        view: how a replica stands now; ``None`` when it does not serve.
        clock: seconds, monotonic.
        random: draws of the shortlist.
        whole_up_to: size up to which every replica is looked at.
    """

    def __init__(
        self,
        choice: WorkerChoice,
        *,
        view: Callable[[str], WorkerView | None],
        clock: Callable[[], float],
        random: random.Random,
        whole_up_to: int = WHOLE_UP_TO,
    ) -> None:
        self._choice = choice
        self._view = view
        self._clock = clock
        self._random = random
        self._whole_up_to = whole_up_to
        self._names: Sequence[str] = ()
        self._known: frozenset[str] = frozenset()
        self._hints = Hints()
        self._looked_at: float | None = None
        self._requests = 0.0
        self._serving = 0

    def resize(self, names: Sequence[str]) -> None:
        """The replicas are these from now on; what those that stay were sent is kept."""
        self._choice.resize(names)
        self._names, self._known = tuple(names), frozenset(names)
        self._looked_at = None

    def sent(self, name: str, wish: Wish) -> None:
        """A replica took the call. One that has gone meanwhile is passed over."""
        if name not in self._known:
            return
        self._choice.sent(name, wish)
        self._requests += 1.0
        if len(self._names) > self._whole_up_to:
            self._hints.sent(name, wish.chain, wish.adapter)

    def place(self, wish: Wish, avoid: Collection[str], *, whole: bool = False) -> Placed:
        """The best replica for a call, and the next best.

        Args:
            wish: what the call would like.
            avoid: replicas that failed it before.
            whole: look at every one, since those of the shortlist had no room.
        """
        whole = whole or len(self._names) <= self._whole_up_to
        views = self._views(self._names if whole else self._shortlist(wish), avoid)
        if not views and not whole:
            whole, views = True, self._views(self._names, avoid)
        best = self._choice.choose(wish, views, None if whole else self._share())
        return Placed(best, tuple(view.name for view in views if view.name != best), whole)

    def _views(self, names: Iterable[str], avoid: Collection[str]) -> list[WorkerView]:
        known, view_of = self._known, self._view
        return [
            view
            for name in names
            if name in known and name not in avoid and (view := view_of(name)) is not None
        ]

    def _shortlist(self, wish: Wish) -> Iterable[str]:
        draw, names = self._random.random, self._names
        found = dict.fromkeys(self._hints.of(wish.chain, wish.adapter))
        found.update(dict.fromkeys(self._choice.near(wish, NEAR)))
        found.update({names[int(draw() * len(names))]: None for _ in range(DRAWN)})
        return found

    def _share(self) -> float:
        """Requests of a replica that has its share, one more included.

        What was sent since the last look is in it, what has ended since is not: for a quarter of a second the
        bound may be a little wide.
        """
        now = self._clock()
        if self._looked_at is None or not 0.0 <= now - self._looked_at < LOOK_S:
            views = self._views(self._names, ())
            self._looked_at, self._serving = now, len(views)
            self._requests = sum([view.requests for view in views])
        return (self._requests + 1.0) / max(1, self._serving)
