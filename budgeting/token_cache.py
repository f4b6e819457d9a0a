"""A small bounded cache: a message's token ids by its role and text."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable


class TokenCache:
    """Least recently used entries go first. Thread-safe.

    Args:
        max_tokens: bound on the ids held; one id takes about 40 bytes, and the texts about 4 more.
        max_entries: bound on the entries, for texts of few tokens.

    An entry of more than an eighth of ``max_tokens`` is not kept: it would push out too many others.
    """

    def __init__(self, *, max_tokens: int, max_entries: int) -> None:
        self._max_tokens = max_tokens
        self._max_entries = max_entries
        self._entries: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> tuple[int, ...] | None:
        """The ids, or none; a hit makes the entry the most recently used."""
        with self._lock:
            ids = self._entries.get(key)
            if ids is not None:
                self._entries.move_to_end(key)
            return ids

    def put(self, key: Hashable, ids: tuple[int, ...]) -> None:
        """Keep an entry, dropping the least recently used ones over the bounds."""
        if len(ids) > self._max_tokens // 8:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self._tokens += len(ids)
            while self._tokens > self._max_tokens or len(self._entries) > self._max_entries:
                _, dropped = self._entries.popitem(last=False)
                self._tokens -= len(dropped)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Ids held now."""
        return self._tokens
