"""Fingerprints of a prompt's beginning: equal ones mean that a worker's prefix cache may hold it.

A chain has one number for each block of token ids, made from the block and from all before it: two prompts
share their first ``k`` blocks when their chains agree in the ``k``-th number. The salt separates what a cache
separates: tenants and adapters.

The numbers are Python's hash of integers and tuples of them, which has no random seed: every process of the
same build makes the same ones. They only steer requests; the worker decides which cached blocks it reuses.
"""

import hashlib
from functools import cache, lru_cache
from typing import NamedTuple

from budgeting.token_ids import PerPiece, TokenIds

MAX_BLOCKS = 1024  # blocks of one chain; a longer prompt is distinguished well enough by its first part

# Bytes of the pieces of prompts whose blocks' hashes are cached: 4 million tokens.
_CACHED_BYTES = 32 * 1024 * 1024


class Fingerprint(NamedTuple):
    """A prompt's chain; the first ``stable`` of its numbers are of the stable prefix."""

    chain: list[int]
    stable: int


@lru_cache(maxsize=1_024)
def salt_number(tenant: str | None, adapter_id: str | None) -> int:
    """A number that differs for different tenants and adapters, the same in every process."""
    text = f"{tenant or ''}\x1f{adapter_id or ''}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def fingerprint(ids: TokenIds, prefix_tokens: int, block_tokens: int, salt: int) -> Fingerprint:
    """The chain of a prompt whose first ``prefix_tokens`` are stable, at most MAX_BLOCKS numbers.

    A block has ``block_tokens`` tokens. In ids of several pieces, whose hashes are cached, blocks start anew
    with each piece, and have what remains of those before it in addition.
    """
    chain: list[int] = []
    link, at, stable, waiting = salt, 0, 0, 0
    for blocks, rest in _hashes(block_tokens).of(ids):
        for block in blocks:
            link = hash((link, block))
            chain.append(link)
            at += block_tokens
            waiting = 0
            if at <= prefix_tokens:
                stable += 1
        if rest is not None:
            size, block = rest
            link = hash((link, block))
            at += size
            waiting += size
            if waiting >= block_tokens:
                chain.append(link)
                waiting = 0
                if at <= prefix_tokens:
                    stable += 1
        if len(chain) >= MAX_BLOCKS:
            del chain[MAX_BLOCKS:]
            break
    return Fingerprint(chain, min(stable, len(chain)))


_Hashes = tuple[tuple[int, ...], tuple[int, int] | None]  # of each whole block; tokens and hash of the rest


@cache
def _hashes(block_tokens: int) -> PerPiece[_Hashes]:

    def of_piece(piece: tuple[int, ...]) -> _Hashes:
        whole = len(piece) - len(piece) % block_tokens
        blocks = [hash(piece[at : at + block_tokens]) for at in range(0, whole, block_tokens)]
        rest = piece[whole:]
        return tuple(blocks), (len(rest), hash(rest)) if rest else None

    return PerPiece(of_piece, _CACHED_BYTES)
