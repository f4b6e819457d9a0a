"""The KV pool of a simulated worker: blocks held by one sequence, and units of prompts that many share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockMemory:
    """Counts blocks; which ones they are does not matter.

    A unit is a piece of a prompt with an id that depends on all before it (as the trace's ids do), so equal
    ids mean equal prefixes. Units that nobody holds stay until their blocks are needed, least lately used
    first.

    Args:
        total_blocks: blocks of the pool.
        unit_blocks: blocks of one unit.
    """

    def __init__(self, total_blocks: int, unit_blocks: int) -> None:
        self.total_blocks = total_blocks
        self._unit_blocks = unit_blocks
        self._own = 0
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._unready: set[int] = set()  # held by the one sequence that computes them

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self._own + len(self._holders) * self._unit_blocks

    @property
    def free(self) -> int:
        """Blocks that can be had, those of idle units included."""
        return self.total_blocks - self.used

    @property
    def idle(self) -> int:
        """Blocks of units that nobody holds."""
        return len(self._idle) * self._unit_blocks

    def find(self, units: Sequence[int]) -> tuple[int, int]:
        """How many leading units are there, and how many a new sequence can share with others.

        What another one is computing just now is computed twice, and is then this one's alone.
        """
        found = 0
        for unit in units:
            if unit in self._unready or (unit not in self._holders and unit not in self._idle):
                break
            found += 1
        for shared in range(found, len(units)):
            if units[shared] in self._unready:
                return found, shared
        return found, len(units)

    def start(self, units: Sequence[int], found: int, own: int) -> bool:
        """Give a new sequence these units, the first ``found`` as they are, and blocks of its own.

        False, and nothing has changed, when there is no room.
        """
        fresh = sum(unit not in self._holders for unit in units)
        if fresh * self._unit_blocks + own > self.free:
            return False
        for index, unit in enumerate(units):
            there = unit in self._holders or unit in self._idle
            self._idle.pop(unit, None)
            self._holders[unit] = self._holders.get(unit, 0) + 1
            if index >= found and not there:
                self._unready.add(unit)
        self._own += own
        self._evict()
        return True

    def grow(self, blocks: int) -> bool:
        """Give so many blocks to one or more sequences; False when there are not as many."""
        if blocks > self.free:
            return False
        self._own += blocks
        if self._idle:
            self._evict()
        return True

    def ready(self, units: Sequence[int]) -> None:
        """These are computed: others may share them."""
        self._unready.difference_update(units)

    def give_back(self, units: Sequence[int], own: int) -> None:
        """A sequence ends; its deeper units are given up before its first ones, since they serve fewer."""
        self._own -= own
        for unit in reversed(units):
            left = self._holders[unit] - 1
            if left:
                self._holders[unit] = left
                continue
            del self._holders[unit]
            if unit in self._unready:
                self._unready.remove(unit)
            else:
                self._idle[unit] = None

    def forget(self) -> None:
        """Give up all units that nobody holds."""
        self._idle.clear()

    def _evict(self) -> None:
        while self.used + self.idle > self.total_blocks:
            self._idle.popitem(last=False)
