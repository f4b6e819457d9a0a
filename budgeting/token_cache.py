"""A cache bounded in bytes: entries that are used again stay, others go; a hit on a new one takes no lock."""

import threading
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

V = TypeVar("V")

# Bytes of an entry without its text and its value: the key's tuple, and its place in a dict of growing size
# (CPython 3.11, measured by benchmarks/budget_planning.py over 100,000 conversations).
ENTRY_BYTES = 200


class TokenCache(Generic[V]):
    """Keeps values in two generations. Thread-safe.

    New and used entries are in the young generation. When it fills half of ``max_bytes``, it becomes the old
    one, and the old one is dropped; an old entry that is used becomes young again. An entry of more than a
    sixteenth of ``max_bytes`` is not stored: it would evict too many others.
    """

    def __init__(self, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._largest = max_bytes // 16
        self._young: dict[Hashable, tuple[V, int]] = {}
        self._old: dict[Hashable, tuple[V, int]] = {}
        self._young_bytes = 0
        self._old_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """The value, or ``None``; a hit makes the entry young again."""
        entry = self._young.get(key)
        if entry is not None:
            return entry[0]
        entry = self._old.get(key)
        if entry is None:
            return None
        self.put(key, *entry)
        return entry[0]

    def get_all(self, keys: Sequence[Hashable]) -> list[V | None]:
        young = map(self._young.get, keys)
        return [self.get(key) if one is None else one[0] for key, one in zip(keys, young, strict=True)]

    def put(self, key: Hashable, value: V, size: int) -> None:
        """Store a value; ``size`` is its bytes, the text of the key included."""
        with_key = size + ENTRY_BYTES
        if with_key > self._largest:
            return
        with self._lock:
            if key in self._young:
                return
            if self._young_bytes + with_key > self._half:
                self._old, self._old_bytes = self._young, self._young_bytes
                self._young, self._young_bytes = {}, 0
            self._young[key] = value, size
            self._young_bytes += with_key

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    @property
    def bytes(self) -> int:
        """Bytes of all entries, by the sizes given with them."""
        return self._young_bytes + self._old_bytes
