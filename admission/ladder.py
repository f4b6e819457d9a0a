"""The degradation ladder: a growing queue shortens, then refuses new requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Rung:
    """One overload level: from ``depth`` waiting requests on, at most ``max_tokens`` for a new answer
    (``None``: as before), or refusals of priority below 0 (``shed_low``) or of every new request
    (``shed_all``)."""

    depth: int
    max_tokens: int | None = None
    shed_low: bool = False
    shed_all: bool = False

    def and_below(self, below: "Rung") -> "Rung":
        """This level with what the level below it does: a longer queue never gives longer answers."""
        caps = [one.max_tokens for one in (self, below) if one.max_tokens is not None]
        return Rung(
            self.depth,
            min(caps, default=None),
            self.shed_low or below.shed_low,
            self.shed_all or below.shed_all,
        )


# Shorter answers cost the least, so they come first; then low priority is refused, then every new request.
RUNGS = (
    Rung(100, max_tokens=2048),
    Rung(500, max_tokens=512),
    Rung(800, shed_low=True),
    Rung(1000, shed_all=True),
)
LEVEL = Rung(0)
# A level is left only when the queue is this much shorter than where it was entered, against flapping.
HYSTERESIS = 0.8


class Ladder:
    """The overload level of one queue, with hysteresis."""

    def __init__(self, rungs: Sequence[Rung] = RUNGS) -> None:
        in_order = sorted(rungs, key=lambda rung: rung.depth)
        self._rungs = tuple(accumulate(in_order, lambda below, rung: rung.and_below(below)))
        self._at = 0  # levels reached

    def at(self, depth: int) -> Rung:
        """Move to the level for a queue of ``depth``, and return it."""
        if not self._at and (not self._rungs or depth < self._rungs[0].depth):
            return LEVEL
        self._at = self.climbed(depth)
        return self._rungs[self._at - 1] if self._at else LEVEL

    def climbed(self, depth: int) -> int:
        """How many levels :meth:`at` would reach; 0: none. Changes nothing."""
        at = self._at
        while at < len(self._rungs) and depth >= self._rungs[at].depth:
            at += 1
        while at and depth < self._rungs[at - 1].depth * HYSTERESIS:
            at -= 1
        return at

    def rung(self, climbed: int) -> Rung:
        """The level with this number; 0: no degradation."""
        return self._rungs[climbed - 1] if climbed else LEVEL
