"""Which worker gets a request: the one that has its prefix cached, unless it is overloaded; sans-I/O.

In this order, among the workers in service below the bound:

1. the worker that got the longest prefix of this prompt; of several the one with the least load;
2. else the first on the ring from the hash of the prompt's stable prefix, preferably one with the adapter;
3. without affinity, or for a prompt too short to have a fingerprint: the one with the least load.

The bound (consistent hashing with bounded loads): no worker gets a request when it has ``factor`` times its
share of all requests, this one included; somewhat more where the prompt is cached. Some worker is always
below it. So the traffic of a popular prefix spreads over as many workers as it needs, and over no more.
"""

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

# Virtual nodes of one worker on the ring: with 16 workers their shares then differ by about a tenth.
PLACES = 128
# Added to the factor of the bound, times the share of the prompt that is cached: another worker would have to
# compute that share. With 0.5 two workers find more than 99 % of what one endless cache finds (simulated,
# Mooncake's multi-turn trace), with 0 as little as 92 %.
CACHED_FACTOR = 0.5
# What loading an adapter costs, in requests of load: it delays the first token by about one answer's time.
ADAPTER_COST = 2.0
ADAPTERS_HELD = 8  # adapters assumed to be held by a worker: the default of the engines here
# KV usage above which a worker soon evicts cached prefixes: each percent above it counts as a request.
KV_FULL = 0.9


class WorkerView(NamedTuple):
    """A worker at the moment of a choice, by its URL. A tuple for speed: one is made for each request.

    ``requests``: ours, and the estimate of others'; ``weight`` is relative to a worker in full service.
    """

    name: str
    requests: float = 0.0
    kv_usage: float = 0.0
    weight: float = 1.0
    adapters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class WorkerPreference:
    """What a request prefers: its prompt's fingerprint, one number per block, and the workers' adapter name.

    The first ``stable_blocks`` of ``chain`` are the stable prefix.
    """

    chain: Sequence[int] = ()
    stable_blocks: int = 0
    adapter: str | None = None


NO_PREFERENCE = WorkerPreference()  # for a pool of one worker, and for embeddings, scores and transcripts


class Ring:
    """A consistent hash ring: adding or removing one of ``n`` names moves about one key in ``n``."""

    __slots__ = ("_names", "_places", "_points")

    def __init__(self, names: Sequence[str]) -> None:
        self._points: list[tuple[int, str]] = []
        self.resize(names)

    def resize(self, names: Sequence[str]) -> None:
        """Replace the names. Cheap when most of them stay, since only new ones are hashed."""
        stay = {name for _, name in self._points}.intersection(names)
        old = [point for point in self._points if point[1] in stay]
        new = [(place, name) for name in names if name not in stay for place in _places_of(name)]
        # Two sorted runs, which Timsort merges in linear time.
        self._points = sorted(old + sorted(new))
        self._places = [place for place, _ in self._points]
        self._names = [name for _, name in self._points]

    def near(self, key: int, count: int) -> list[str]:
        """The first ``count`` different names from the key's position on."""
        found = dict[str, None]()
        for name in self._names_from(key):
            found[name] = None
            if len(found) == count:
                break
        return list(found)

    def first(self, key: int, allowed: frozenset[str] | set[str]) -> str | None:
        """The first allowed name from the key's position on."""
        return next(filter(allowed.__contains__, self._names_from(key)), None)

    def _names_from(self, key: int) -> Iterator[str]:
        names, start = self._names, bisect_right(self._places, _spread(key))
        return map(names.__getitem__, chain(range(start, len(names)), range(start)))


class SentIndex:
    """The blocks sent to one worker, newest last: its prefix cache is assumed to hold them."""

    __slots__ = ("_blocks", "_most")

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, chain: Sequence[int]) -> int:
        """Number of leading blocks that were sent, by binary search: a block implies those before it."""
        blocks = self._blocks
        if not chain or chain[0] not in blocks:
            return 0
        low, high = 1, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, chain: Sequence[int]) -> None:
        """Add a prompt's blocks, last block first, so that a chain is evicted from its end."""
        blocks = self._blocks
        for link in reversed(chain):
            blocks[link] = None
            blocks.move_to_end(link)
        while len(blocks) > self._most:
            blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all blocks: the worker may have lost its cache."""
        self._blocks.clear()


class WorkerChoice:
    """Chooses among workers.

    Args:
        factor: factor of the bound on load, at least 1.
        index_blocks: blocks stored for each worker.
        affinity: when off, only load decides.
    """

    def __init__(
        self, names: Sequence[str], *, factor: float = 1.25, index_blocks: int = 32_768, affinity: bool = True
    ) -> None:
        self._ring = Ring(names)
        self._index = {name: SentIndex(index_blocks) for name in names}
        self._index_blocks = index_blocks
        self._factor = factor
        self._affinity = affinity
        # Ties go to the worker that was chosen least recently.
        self._turns = {name: number - len(names) for number, name in enumerate(names)}
        self._turn = 0
        # Adapters sent to each worker, last used last: it probably still holds them.
        self._adapters: dict[str, OrderedDict[str, None]] = {name: OrderedDict() for name in names}

    def resize(self, names: Sequence[str]) -> None:
        """Replace the workers; the state of those that stay is kept."""
        if self._index.keys() == set(names):
            return
        self._ring.resize(names)
        self._index = {name: self._index.get(name, SentIndex(self._index_blocks)) for name in names}
        self._turns = {name: self._turns.get(name, self._turn) for name in names}
        self._adapters = {name: self._adapters.get(name, OrderedDict()) for name in names}

    def near(self, preference: WorkerPreference, count: int) -> list[str]:
        """The first ``count`` workers on the ring from a prompt's position; none when only load decides."""
        return self._ring.near(_key(preference), count) if self._affinity and preference.chain else []

    def choose(
        self, preference: WorkerPreference, workers: Sequence[WorkerView], share: float | None = None
    ) -> str | None:
        """The worker for a request; ``None`` when there is none. Deterministic.

        ``share``: the average of requests on a worker of weight 1, this request included; needed where
        ``workers`` are a part of the pool. When all of them are over the bound, only load decides.
        """
        if not workers:
            return None
        if share is None:
            requests, weight = 1.0, 0.0
            for worker in workers:
                requests += worker.requests
                weight += worker.weight
            share = requests / weight
        affinity = self._affinity and bool(preference.chain)
        if affinity and (cached := self._with_prefix(preference, workers, share)):
            return self._least_loaded(cached, preference.adapter)
        # At least one of all workers is strictly below the bound: else their sum would exceed the total.
        under = [worker for worker in workers if worker.requests < self._factor * share * worker.weight]
        if not affinity or len(under) <= 1:
            return self._least_loaded(under or workers, preference.adapter)
        holders = {worker.name for worker in under if self._holds(worker, preference.adapter)}
        return self._ring.first(_key(preference), holders or {worker.name for worker in under})

    def _with_prefix(
        self, preference: WorkerPreference, workers: Sequence[WorkerView], share: float
    ) -> list[WorkerView]:
        """The workers with the longest cached prefix, among those below the bound that their prefix gives."""
        longest, best = 0, list[WorkerView]()
        for worker in workers:
            match = self._index[worker.name].match(preference.chain)
            factor = self._factor + CACHED_FACTOR * match / len(preference.chain)
            if match >= max(longest, 1) and worker.requests < factor * share * worker.weight:
                best = [*best, worker] if match == longest else [worker]
                longest = match
        return best

    def _least_loaded(self, workers: Sequence[WorkerView], adapter: str | None) -> str:
        return min(workers, key=lambda worker: (self._load(worker, adapter), self._turns[worker.name])).name

    def _load(self, worker: WorkerView, adapter: str | None) -> float:
        load = (worker.requests + 1.0) / worker.weight
        if adapter is not None and not self._holds(worker, adapter):
            load += ADAPTER_COST
        return load + 100.0 * max(0.0, worker.kv_usage - KV_FULL) + worker.kv_usage

    def _holds(self, worker: WorkerView, adapter: str | None) -> bool:
        return adapter is not None and (adapter in worker.adapters or adapter in self._adapters[worker.name])

    def sent(self, name: str, preference: WorkerPreference) -> None:
        self._turn += 1
        self._turns[name] = self._turn
        self._index[name].add(preference.chain)
        if preference.adapter is not None:
            held = self._adapters[name]
            held[preference.adapter] = None
            held.move_to_end(preference.adapter)
            if len(held) > ADAPTERS_HELD:
                held.popitem(last=False)

    def lost(self, name: str, adapter: str) -> None:
        self._adapters[name].pop(adapter, None)

    def forget(self, name: str) -> None:
        """Forget what the worker was sent: after an outage its cache and its adapters may be lost."""
        self._index[name].clear()
        self._adapters[name].clear()


def _key(preference: WorkerPreference) -> int:
    return preference.chain[max(0, min(preference.stable_blocks, len(preference.chain)) - 1)]


@lru_cache(maxsize=1_024)
def _places_of(name: str) -> tuple[int, ...]:
    """A name's places on the ring; cached, since workers return and several models share them."""
    return tuple([_place(f"{name}\x1f{number}") for number in range(PLACES)])


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _spread(key: int) -> int:
    """Spread a key over the whole ring, since Python's hashes of small values are close together."""
    return int.from_bytes(hashlib.blake2b((key % 2**64).to_bytes(8, "big"), digest_size=8).digest(), "big")
