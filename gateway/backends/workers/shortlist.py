"""Which workers last got a prompt's prefix or an adapter: hints for the choice in a large pool; sans-I/O.

A hint may be stale. The choice checks it against the worker's own index, so a stale one costs one lookup.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

# Workers stored for each block: if the bound on load excludes the last one, an earlier one may do.
WORKERS_PER_KEY = 4
# Hints in all. One takes about 250 bytes and a prompt adds about a dozen: some 80,000 conversations, 250 MB.
MOST_HINTS = 1_000_000
# Positions of a chain that are stored in addition to its last one, each about a quarter further than the one
# before. A conversation's next turn contains the last position of the turn before; another prompt with the
# same beginning contains some of these.
_PLACES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 19, 24, 30, 38, 48, 60, 75, 94, 118, 148, 185, 231, 289, 361, 451)
PLACES = (*_PLACES, 564, 705, 881)


class Hints:
    """The last few workers that got a block or an adapter; the least recently used entry is dropped first.

    ``most``: most hints stored.
    """

    __slots__ = ("_last", "_most")

    def __init__(self, most: int = MOST_HINTS) -> None:
        self._most = most
        self._last: OrderedDict[int | str, tuple[str, ...]] = OrderedDict()

    def sent(self, name: str, chain: Sequence[int], adapter: str | None) -> None:
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
        """Workers that may hold most of the prompt, then those that may hold the adapter.

        At most WORKERS_PER_KEY of each.
        """
        last, found = self._last, dict[str, None]()
        for link in reversed(chain):
            names = last.get(link)
            if names is not None:
                found.update(dict.fromkeys(names))
                if len(found) >= WORKERS_PER_KEY:
                    break
        workers = list(found)[:WORKERS_PER_KEY]
        return workers if adapter is None else [*workers, *last.get(adapter, ())]

    def _note(self, key: int | str, name: str) -> None:
        last = self._last
        names = last.get(key)
        if names is None:
            last[key] = (name,)
            return
        if names[0] != name:
            last[key] = (name, *[one for one in names if one != name][: WORKERS_PER_KEY - 1])
        last.move_to_end(key)
