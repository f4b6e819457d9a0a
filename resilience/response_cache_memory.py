"""A store of answers in this process; the least recently used and expired ones are evicted."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from resilience.response_cache_values import MAX_SHELF, CacheFigures, StoredAnswer

ENTRY_BYTES = 1_024  # memory of an entry in addition to its text; measured, rounded up


class MemoryStore:
    """A store of at most ``capacity`` entries and ``max_bytes``, estimated; each expires after ``ttl_s``."""

    def __init__(self, *, capacity: int, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        # Least recently used first.
        self._entries: OrderedDict[str, StoredAnswer] = OrderedDict()
        # The keys of each shelf, oldest first.
        self._shelves: dict[str, OrderedDict[str, None]] = {}
        self._bytes = 0

    async def get(self, key: str) -> StoredAnswer | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() - entry.put_at >= self._ttl_s:
            self._remove(key)
            return None
        self._entries.move_to_end(key)
        return entry

    async def shelf(self, shelf: str) -> Sequence[tuple[str, bytes]]:
        return [(key, self._entries[key].vector) for key in reversed(self._shelves.get(shelf, ()))]

    async def put(self, entries: Sequence[StoredAnswer]) -> None:
        for entry in entries:
            self._put(entry)

    def figures(self) -> CacheFigures:
        """Number and bytes; expired entries count until they are read or evicted."""
        return CacheFigures(len(self._entries), self._bytes)

    async def close(self) -> None:
        """Nothing to close."""

    def check_integrity(self) -> None:
        """Assert that the entries are counted and within their bounds."""
        assert self._bytes == sum(map(_size, self._entries.values())) <= self._max_bytes
        assert len(self._entries) <= self._capacity
        shelved = [(shelf, key) for shelf, keys in self._shelves.items() for key in keys]
        assert sorted(shelved) == sorted((one.shelf, key) for key, one in self._entries.items() if one.shelf)
        assert all(0 < len(keys) <= MAX_SHELF for keys in self._shelves.values())

    def _put(self, entry: StoredAnswer) -> None:
        if entry.key in self._entries:
            self._remove(entry.key)
        if _size(entry) > self._max_bytes:
            return
        self._entries[entry.key] = entry
        self._bytes += _size(entry)
        if entry.shelf is not None:
            keys = self._shelves.setdefault(entry.shelf, OrderedDict())
            keys[entry.key] = None
            if len(keys) > MAX_SHELF:
                self._remove(next(iter(keys)))
        while len(self._entries) > self._capacity or self._bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key)
        self._bytes -= _size(entry)
        if entry.shelf is not None:
            keys = self._shelves[entry.shelf]
            del keys[key]
            if not keys:
                del self._shelves[entry.shelf]


def _size(entry: StoredAnswer) -> int:
    # Python takes at most four bytes a character.
    return ENTRY_BYTES + 4 * (len(entry.answer.text) + len(entry.answer.reasoning or "")) + len(entry.vector)
