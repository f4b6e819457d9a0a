"""Chooses the engine replica for a call; sans-I/O.

Up to ``WHOLE_UP_TO`` replicas are all compared for each call. Of more, only a shortlist is compared, as in a
large pool of remote workers (:mod:`gateway.backends.workers.pool`): replicas that last got the prompt's
prefix or its adapter, the first ones on the ring, and a few at random. The bound on load is the fleet's.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from random import Random

from gateway.backends.workers.pool import DRAWN, MAX_SNAPSHOT_AGE_S, NEAR, WHOLE_UP_TO
from gateway.backends.workers.shortlist import Hints
from gateway.backends.workers.worker_choice import WorkerChoice, WorkerPreference, WorkerView


@dataclass(frozen=True, slots=True)
class Placed:
    """The replica to call first, if any serves, and the others; ``whole``: all serving ones are included."""

    best: str | None
    others: tuple[str, ...]
    whole: bool


@dataclass(eq=False)
class ReplicaFleet:
    """The replicas of one deployment; ``view`` returns a replica's load, ``None`` if it does not serve."""

    choice: WorkerChoice
    _: KW_ONLY
    view: Callable[[str], WorkerView | None]
    clock: Callable[[], float]
    random: Random
    whole_up_to: int = WHOLE_UP_TO

    def __post_init__(self) -> None:
        self._names: Sequence[str] = ()
        self._known: frozenset[str] = frozenset()
        self._hints = Hints()
        self._looked_at: float | None = None
        self._requests = 0.0
        self._serving = 0

    def resize(self, names: Sequence[str]) -> None:
        """Set the replicas; those that stay keep their history."""
        self.choice.resize(names)
        self._names, self._known = tuple(names), frozenset(names)
        self._looked_at = None

    def sent(self, name: str, preference: WorkerPreference) -> None:
        """Record that a replica accepted the call; a replica that is gone is ignored."""
        if name not in self._known:
            return
        self.choice.sent(name, preference)
        self._requests += 1.0
        if len(self._names) > self.whole_up_to:
            self._hints.sent(name, preference.chain, preference.adapter)

    def place(self, preference: WorkerPreference, avoid: Collection[str], *, whole: bool = False) -> Placed:
        """The best replica for a call, and others; ``whole``: compare all, since the shortlist was full."""
        whole = whole or len(self._names) <= self.whole_up_to
        views = self._views(self._names if whole else self._shortlist(preference), avoid)
        if not views and not whole:
            whole, views = True, self._views(self._names, avoid)
        best = self.choice.choose(preference, views, None if whole else self._share())
        return Placed(best, tuple(view.name for view in views if view.name != best), whole)

    def _views(self, names: Iterable[str], avoid: Collection[str]) -> list[WorkerView]:
        known, view_of = self._known, self.view
        return [
            view
            for name in names
            if name in known and name not in avoid and (view := view_of(name)) is not None
        ]

    def _shortlist(self, preference: WorkerPreference) -> Iterable[str]:
        draw, names = self.random.random, self._names
        found = dict.fromkeys(self._hints.of(preference.chain, preference.adapter))
        found.update(dict.fromkeys(self.choice.near(preference, NEAR)))
        found.update({names[int(draw() * len(names))]: None for _ in range(DRAWN)})
        return found

    def _share(self) -> float:
        """The average number of requests per serving replica, the new one included.

        Requests that ended in the last quarter of a second still count, so the bound may be a little high.
        """
        now = self.clock()
        if self._looked_at is None or not 0.0 <= now - self._looked_at < MAX_SNAPSHOT_AGE_S:
            views = self._views(self._names, ())
            self._looked_at, self._serving = now, len(views)
            self._requests = sum([view.requests for view in views])
        return (self._requests + 1.0) / max(1, self._serving)
