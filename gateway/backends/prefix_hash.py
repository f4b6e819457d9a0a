"""Fingerprints of a prompt's beginning: equal ones mean that a worker's prefix cache may hold it.

A chain has one number for each whole block of token ids, made from the block and from all before it: two
prompts share their first ``k`` blocks when their chains agree in the ``k``-th number. The salt separates what
a cache separates: tenants and adapters.

The numbers are Python's hash of integers and tuples of them, which has no random seed: every process of the
same build makes the same ones. They only steer requests; the worker decides which cached blocks it reuses.
"""

import hashlib

MAX_BLOCKS = 1024  # blocks of one chain; a longer prompt is distinguished well enough by its first part


def salt_number(tenant: str | None, adapter_id: str | None) -> int:
    """A number that differs for different tenants and adapters, the same in every process."""
    text = f"{tenant or ''}\x1f{adapter_id or ''}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def chain_of(token_ids: tuple[int, ...], block_tokens: int, salt: int) -> list[int]:
    """One number for each whole block, at most MAX_BLOCKS."""
    last = min(len(token_ids) // block_tokens, MAX_BLOCKS) * block_tokens
    chain = []
    link = salt
    for start in range(0, last, block_tokens):
        link = hash((link, token_ids[start : start + block_tokens]))
        chain.append(link)
    return chain
