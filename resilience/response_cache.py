"""Answers kept for an outage: exact matches only, bounded in number and age."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

# 256 bits: two different requests never share a key in practice, also when one of them is crafted.
KEY_BYTES = 32


class ResponseCache(Generic[T]):
    """A cache with a bound on entries (the least recently used leaves) and on their age.

    Callers put only complete, undegraded answers in.

    Args:
        capacity: most entries, at least 1.
        ttl_s: age from which an entry counts as absent, seconds, above 0.
        clock: seconds, monotonic.
    """

    def __init__(self, capacity: int, ttl_s: float, clock: Callable[[], float]) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; allowed: 1 or more")
        if not ttl_s > 0:
            raise ValueError(f"ttl_s is {ttl_s}; allowed: above 0")
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._clock = clock
        # least recently used first; the time is when the entry was put
        self._entries: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def __len__(self) -> int:
        """Entries held, too old ones included until they are asked for or pushed out."""
        return len(self._entries)

    def get(self, key: str) -> T | None:
        """The value put under ``key``, unless it left or is too old."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        put_at, value = entry
        if self._clock() - put_at >= self._ttl_s:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return value

    def put(self, key: str, value: T) -> None:
        """Keep ``value``; it replaces an older one of the same key and starts a new age."""
        self._entries[key] = (self._clock(), value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)


def cache_key(
    *,
    tenant: str,
    model: str,
    adapter_id: str | None,
    prompt_version: str | None,
    token_ids: Sequence[int],
    sampling_repr: str,
) -> str:
    """A key that two requests share only when they ask for the same in every respect that shows.

    The whole prompt is in ``token_ids``, personalized context too, so nothing leaks between tenants,
    adapters, prompt versions or contexts. Each field goes in with its length, so that no two different
    lists of fields give the same bytes. 64 hex digits (blake2b).
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for text in (tenant, model, adapter_id, prompt_version, sampling_repr):
        if text is None:
            digest.update(b"\x00")
            continue
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"\x01" + struct.pack("<q", len(data)) + data)
    # In the machine's own order, which packs three times as fast; keys never leave the process.
    digest.update(array("I", token_ids))
    return digest.hexdigest()
