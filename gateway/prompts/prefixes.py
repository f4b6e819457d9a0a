"""What of a prompt's stable prefix should be found in the prefix cache, to compare with what was found.

If most of the prefix is expected but little found, the engine does not keep it (too little memory, no
affinity, caching switched off). If little is expected, the prefix itself changes from request to request, as
after a change of prompt that adds something volatile.
"""

from collections.abc import Callable

from msgspec import Struct

from budgeting.token_ids import first
from budgeting.values import Plan
from gateway.backends.port import Backend
from gateway.backends.prefix_hash import chain_of

# Blocks that are remembered: 2,600 prefixes of 400 tokens, about 8 MiB.
MAX_BLOCKS_SEEN = 65_536

# Prefixes whose keys are kept, and the longest such one: 5 MiB at most.
MAX_LATELY = 64
MAX_TOKENS_LATELY = 4096

_64_BITS = (1 << 64) - 1


# Backend, tenant (none when tenants share), adapter, tokens of a block.
_Place = tuple[str, str | None, str | None, int]
# A prefix's fingerprint, and what each of its blocks is remembered by.
_Keys = tuple[str | None, tuple[int, ...]]


class Prefix(Struct, frozen=True):
    """The stable prefix of one request, bound for one backend.

    ``fingerprint`` is 16 hex digits over the ids of its whole blocks (``None`` without any), the same for
    every tenant, adapter and process. ``tokens`` fill those blocks; ``expected`` of them were computed there
    before, from the beginning on. ``keys`` identify the blocks.
    """

    fingerprint: str | None
    tokens: int
    expected: int
    backend: str
    keys: tuple[int, ...]


def fingerprint_of(token_ids: tuple[int, ...], prefix_tokens: int, block_size: int) -> str | None:
    """The fingerprint of a prompt's stable prefix; ``None`` when it fills no whole block."""
    chain = chain_of(token_ids[:prefix_tokens], block_size, 0)
    return _hex(chain[-1]) if chain else None


class PrefixWatch:
    """Remembers which blocks of stable prefixes each backend has computed, about ``max_blocks`` of them.

    They are remembered in two halves. Once the new half is full it becomes the old one, and what was not
    computed again since the last such change is forgotten, all of a prefix together.

    ``block_size``, of a model, is for backends that do not report it; ``shared``: tenants find each other's
    prefixes.
    """

    def __init__(
        self, *, block_size: Callable[[str], int], shared: bool = False, max_blocks: int = MAX_BLOCKS_SEEN
    ) -> None:
        self._block_size = block_size
        self._shared = shared
        self._max_blocks = max_blocks
        self._new: set[int] = set()
        self._old: set[int] = set()
        # First in, first out.
        self._lately: dict[tuple[tuple[int, ...], _Place], _Keys] = {}

    def expect(self, plan: Plan, backend: Backend, tenant: str, adapter_id: str | None) -> Prefix:
        """What that backend should find of the plan's stable prefix."""
        load = backend.load
        block_size = 0 if load is None else load.block_size
        if block_size <= 0:  # it does not report it
            block_size = self._block_size(backend.model)
        place = (backend.name, None if self._shared else tenant, adapter_id, block_size)
        fingerprint, keys = self._keys_of(first(plan.token_ids, plan.prefix_tokens), place)
        known, new, old = len(keys), self._new, self._old
        if not new.issuperset(keys):
            known = next((at for at, key in enumerate(keys) if key not in new and key not in old), known)
        return Prefix(fingerprint, len(keys) * block_size, known * block_size, backend.name, keys)

    def _keys_of(self, token_ids: tuple[int, ...], place: _Place) -> _Keys:
        """A prefix's fingerprint and its blocks' keys in a place; most requests share a few prefixes."""
        asked = (token_ids, place)
        known = self._lately.get(asked)
        if known is not None:
            return known
        chain = chain_of(token_ids, place[-1], 0)
        salt = hash(place)
        found = _hex(chain[-1]) if chain else None, tuple([hash((salt, link)) for link in chain])
        if len(token_ids) <= MAX_TOKENS_LATELY:
            if len(self._lately) >= MAX_LATELY:
                del self._lately[next(iter(self._lately))]
            self._lately[asked] = found
        return found

    def computed(self, prefix: Prefix) -> None:
        """The backend has computed this prefix."""
        self._new.update(prefix.keys)
        if len(self._new) > self._max_blocks // 2:
            self._old, self._new = self._new, set()


def _hex(link: int) -> str:
    return f"{link & _64_BITS:016x}"
