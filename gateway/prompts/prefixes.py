"""Predicts how much of a prompt's stable prefix is in the prefix cache, to compare with the cached tokens.

If most of the prefix is expected but little is found, the engine does not cache it (too little memory, no
affinity, caching switched off). If little is expected, the prefix itself changes from request to request,
for example after a change of the prompt that adds something volatile.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from msgspec import Struct

from budgeting.token_ids import leading
from budgeting.values import Plan
from gateway.backends.port import Backend
from gateway.backends.prefix_hash import fingerprint

MAX_BLOCKS_SEEN = 65_536  # the most remembered blocks: 2,600 prefixes of 400 tokens, about 8 MiB

# The most prefixes whose keys are cached, and the tokens of the longest one: 21 MiB at most, of which most is
# shared with the tokenizer's cache.
MAX_CACHED_KEYS = 64
MAX_CACHED_TOKENS = 32_768

_64_BITS = (1 << 64) - 1


# Backend, tenant (none if tenants share prefixes), adapter, tokens of a block.
_Place = tuple[str, str | None, str | None, int]
_Pieces = tuple[tuple[int, ...], ...]
_Keys = tuple[str | None, tuple[int, ...]]  # a prefix's fingerprint, and the key of each of its blocks


class Prefix(Struct, frozen=True):
    """The stable prefix of one request for one backend.

    ``fingerprint`` is 16 hex digits computed from the token ids of its full blocks (``None`` without any),
    equal for every tenant, adapter and process. ``tokens`` is the number of tokens in those blocks, and
    ``expected`` that in leading blocks which the backend has computed before. ``keys`` identify the blocks;
    none if all of them are in the newer set.
    """

    fingerprint: str | None
    tokens: int
    expected: int
    backend: str
    keys: tuple[int, ...]


def fingerprint_of(token_ids: tuple[int, ...], prefix_tokens: int, block_size: int) -> str | None:
    """Return the fingerprint of a prompt's stable prefix; ``None`` if it fills no block."""
    links = fingerprint(token_ids[:prefix_tokens], 0, block_size, 0).chain
    return _hex(links[-1]) if links else None


@dataclass(slots=True, eq=False)
class PrefixWatch:
    """Remembers about ``max_blocks`` blocks of stable prefixes that each backend has computed.

    The blocks are in two sets of half the size. A full new set replaces the old one, whose blocks are dropped
    unless they were computed again; all blocks of a prefix are dropped together.

    ``block_size`` returns a model's block size, for backends that do not report it; with ``shared``, tenants
    share prefixes.
    """

    block_size: Callable[[str], int]
    shared: bool = False
    max_blocks: int = MAX_BLOCKS_SEEN
    _new: set[int] = field(default_factory=set, init=False)
    _old: set[int] = field(default_factory=set, init=False)
    _known: dict[tuple[_Place, int], tuple[_Pieces, _Keys]] = field(default_factory=dict, init=False)

    def expect(self, plan: Plan, backend: Backend, tenant: str, adapter_id: str | None) -> Prefix:
        """Return the plan's stable prefix, with the tokens of it that ``backend`` should find cached."""
        load = backend.load
        block_size = 0 if load is None else load.block_size
        if block_size <= 0:  # the backend does not report it
            block_size = self.block_size(backend.model)
        place = (backend.name, None if self.shared else tenant, adapter_id, block_size)
        fingerprint, keys = self._keys_of(leading(plan.token_ids, plan.prefix_tokens), place)
        known, new, old = len(keys), self._new, self._old
        new_keys: tuple[int, ...] = ()
        if keys and keys[-1] not in new:  # the blocks of a prefix are added and dropped together
            known = next((at for at, key in enumerate(keys) if key not in new and key not in old), known)
            new_keys = keys
        return Prefix(fingerprint, len(keys) * block_size, known * block_size, backend.name, new_keys)

    def answered(self, prefix: Prefix, backend: str) -> None:
        """Note that ``backend`` has answered the request: it has computed the prefix if that is its own."""
        if backend != prefix.backend:
            return
        self._new.update(prefix.keys)
        if len(self._new) > self.max_blocks // 2:
            self._old, self._new = self._new, set()

    def _keys_of(self, pieces: _Pieces, place: _Place) -> _Keys:
        """Return a prefix's fingerprint and block keys, cached: most requests share a few prefixes."""
        # By its length, since the hash of its ids would cost more than all the rest; pieces that are the same
        # object are not compared id by id.
        length = sum(map(len, pieces))
        known = self._known.get((place, length))
        if known is None or known[0] != pieces:
            ids, salt = tuple(chain.from_iterable(pieces)), hash(place)
            links = fingerprint(ids, 0, place[-1], 0).chain
            keys = _hex(links[-1]) if links else None, tuple([hash((salt, link)) for link in links])
            if length > MAX_CACHED_TOKENS:
                return keys
            if len(self._known) >= MAX_CACHED_KEYS:
                del self._known[next(iter(self._known))]
            known = self._known[place, length] = pieces, keys
        return known[1]


def _hex(link: int) -> str:
    return f"{link & _64_BITS:016x}"
