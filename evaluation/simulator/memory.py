"""The KV pool of a simulated worker: blocks of single sequences, and prompt units that sequences share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockMemory:
    """Counts blocks, without telling them apart.

    A unit is a piece of a prompt with an id that depends on all pieces before it (as the trace's ids do), so
    equal ids mean equal prefixes. Units that no sequence holds stay cached until their blocks are needed; the
    least recently used goes first.

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
        self._unready: set[int] = set()  # held only by the sequence that computes them

    @property
    def used(self) -> int:
        """Return the number of blocks that sequences hold."""
        return self._own + len(self._holders) * self._unit_blocks

    @property
    def free(self) -> int:
        """Return the number of available blocks, including those of idle units."""
        return self.total_blocks - self.used

    @property
    def idle(self) -> int:
        """Return the number of blocks of units that no sequence holds."""
        return len(self._idle) * self._unit_blocks

    def find(self, units: Sequence[int]) -> tuple[int, int]:
        """Return how many leading units are cached, and how many a new sequence can share with others.

        A unit that another sequence is computing now is computed again, into the new sequence's own blocks.
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
        """Give a new sequence these units, the first ``found`` of them cached, and ``own`` blocks.

        Return False, with nothing changed, when there are not enough blocks.
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
        """Give ``blocks`` blocks to one or more sequences; return False when there are not enough."""
        if blocks > self.free:
            return False
        self._own += blocks
        if self._idle:
            self._evict()
        return True

    def ready(self, units: Sequence[int]) -> None:
        """Mark units as computed, so that other sequences may share them."""
        self._unready.difference_update(units)

    def give_back(self, units: Sequence[int], own: int) -> None:
        """End a sequence; its last units become idle before its first, since fewer prompts share them."""
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
        """Evict all units that no sequence holds."""
        self._idle.clear()

    def _evict(self) -> None:
        while self.used + self.idle > self.total_blocks:
            self._idle.popitem(last=False)
