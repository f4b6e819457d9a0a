"""The schedule of fault actions; sans-I/O."""

import math
import random
from bisect import insort
from collections.abc import Sequence
from operator import itemgetter

from ops.chaos.scenario import Fault, FaultAction, RandomFaults


class Timeline:
    """The actions to be carried out, scripted and random. Times are seconds since the load's start."""

    def __init__(self, faults: Sequence[Fault], chance: RandomFaults | None = None) -> None:
        self._timed: list[tuple[float, FaultAction]] = []  # in the order of their times
        for fault in faults:
            if fault.at_s is not None:
                self._at(fault.at_s, fault.do)
        counted = [(fault.after_tokens, fault.do) for fault in faults if fault.after_tokens is not None]
        self._counted = sorted(counted, key=lambda one: one[0])
        self._chance = chance
        self._random = random.Random(chance.seed if chance is not None else 0)
        self._next_chance_s = math.inf if chance is None else self._random.uniform(*chance.every_s)

    @property
    def over(self) -> bool:
        """Whether no action is left, scripted or random."""
        return not self._timed and not self._counted and self._chance is None

    @property
    def next_s(self) -> float:
        """The time of the next timed action; infinity without one."""
        return min(self._timed[0][0] if self._timed else math.inf, self._next_chance_s)

    def due(self, now_s: float, tokens: float) -> list[FaultAction]:
        """Remove and return the actions due now; ``tokens``: pieces of the average stream so far."""
        while now_s >= self._next_chance_s:
            self._draw()
        found = []
        while self._timed and self._timed[0][0] <= now_s:
            found.append(self._timed.pop(0)[1])
        while self._counted and self._counted[0][0] <= tokens:
            found.append(self._counted.pop(0)[1])
        return found

    @property
    def left(self) -> list[FaultAction]:
        """The scripted actions that have not been carried out, in order; none with random faults."""
        if self._chance is not None:
            return []
        return [action for _, action in (*self._timed, *self._counted)]

    def end(self) -> list[FaultAction]:
        """Drop all actions; returns the timed ones that break nothing, since they may repair something."""
        self._chance, self._next_chance_s = None, math.inf
        rest = [action for _, action in self._timed if action.breaks is None]
        self._timed.clear()
        self._counted.clear()
        return rest

    def _draw(self) -> None:
        chance, at_s = self._chance, self._next_chance_s
        assert chance is not None
        [drawn] = self._random.choices(chance.choices, [choice.weight for choice in chance.choices])
        self._at(at_s, drawn.do)
        if drawn.then is not None:
            self._at(at_s + drawn.for_s, drawn.then)
        # One fault at a time: the next one comes after this one has been repaired.
        self._next_chance_s = at_s + drawn.for_s + self._random.uniform(*chance.every_s)

    def _at(self, at_s: float, action: FaultAction) -> None:
        insort(self._timed, (at_s, action), key=itemgetter(0))
