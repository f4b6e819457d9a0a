"""Who was last sent the beginning of a prompt, or an adapter: hints where to look in a large pool; sans-I/O.

A hint may be wrong. Whoever follows it asks the worker's own index: a stale one costs a look and no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

# Names kept of each block: the bound on load makes a favourite's next worker known while the last is full.
KEPT = 4
# Hints in all. One is about 250 bytes, a prompt leaves about a dozen: some 80,000 conversations, 250 MB.
MOST_HINTS = 1_000_000
# Places of a chain that are noted besides its last one, each about a quarter further than the one before. A
# conversation's next turn has the last place of the turn before; others that begin alike have some of these.
_PLACES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 19, 24, 30, 38, 48, 60, 75, 94, 118, 148, 185, 231, 289, 361, 451)
PLACES = (*_PLACES, 564, 705, 881)


class Hints:
    """The last few workers that were sent a block or an adapter, the one used longest ago forgotten first.

    Args:
        most: hints kept.
    """

    __slots__ = ("_last", "_most")

    def __init__(self, most: int = MOST_HINTS) -> None:
        self._most = most
        self._last: OrderedDict[int | str, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def sent(self, name: str, chain: Sequence[int], adapter: str | None) -> None:
        """A worker was sent a prompt with this fingerprint."""
        length = len(chain)
        if length:
            for place in takewhile(lambda place: place < length, PLACES):
                self._note(chain[place - 1], name)
            self._note(chain[-1], name)
        if adapter is not None:
            self._note(adapter, name)
        while len(self._last) > self._most:
            self._last.popitem(last=False)

    def of(self, chain: Sequence[int], adapter: str | None) -> list[str]:
        """Those that may hold most of it, at most KEPT; then those that may hold the adapter, as many."""
        last, found = self._last, dict[str, None]()
        for link in reversed(chain):
            names = last.get(link)
            if names is not None:
                found.update(dict.fromkeys(names))
                if len(found) >= KEPT:
                    break
        told = list(found)[:KEPT]
        return told if adapter is None else [*told, *last.get(adapter, ())]

    def _note(self, key: int | str, name: str) -> None:
        last = self._last
        names = last.get(key)
        if names is None:
            last[key] = (name,)
            return
        if names[0] != name:
            last[key] = (name, *[one for one in names if one != name][: KEPT - 1])
        last.move_to_end(key)
