"""The identities of full blocks, and the map from identities to blocks.

A key and a value depend on all tokens before them, so a sequence can share a block only when all tokens up to
the block's end are the same. Its identity is a digest, 16 bytes long, of the identity of the previous block
and of its own tokens.

    root ──> digest(root, tokens 0-15) ──> digest(…, tokens 16-31) ──> …

The root is a digest of the salt (the tenant's) and the version of the adapter. BLAKE2b of 128 bits makes
collisions implausible, by chance or by intent.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from engine.sequence import AdapterVersion

DIGEST_BYTES = 16


def chain_root(salt: str | None, adapter: AdapterVersion | None) -> bytes:
    """The parent of the first block of all sequences with this salt and adapter version."""
    origin = repr((salt, adapter))  # unlike a join, different pairs never give the same text
    return blake2b(origin.encode(), digest_size=DIGEST_BYTES).digest()


def extend_chain(digests: list[bytes], parent: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append the identities of the next full blocks to ``digests``, whose last one is ``parent``."""
    for start in range(len(digests) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("I", token_ids[start : start + block_size])
        parent = blake2b(parent + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


class PrefixCache:
    """The known blocks: a block has at most one identity, and an identity at most one block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of ``digests``."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def put(self, digest: bytes, block: int) -> int | None:
        """Give this identity to ``block``; returns the block that had it before."""
        before = self._block_of.get(digest)
        if before is not None:
            del self._digest_of[before]
        self._block_of[digest] = block
        self._digest_of[block] = digest
        return before

    def drop(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
