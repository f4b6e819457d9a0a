"""flash-attn for one query per sequence on CUDA, without copying blocks.

It reads a block table directly, in half precision and for blocks of a multiple of 256 tokens. The kernel of
``fused`` takes every type and block size. Where neither runs, blocks are gathered (``attention``).
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

# The block size must be a multiple of this for flash-attn 2.
FLASH_BLOCK_MULTIPLE = 256


def takes_flash(dtype: torch.dtype, block_size: int) -> bool:
    """Whether flash-attn, if it is installed, can attend in this dtype over blocks of this size."""
    return dtype in (torch.float16, torch.bfloat16) and block_size % FLASH_BLOCK_MULTIPLE == 0


def flash_kernel(
    heads: int, kv_heads: int, head_dim: int, *, block_size: int, dtype: torch.dtype
) -> "FlashDecode | None":
    """flash-attn's kernel; None if it is not installed or does not take this dtype or block size."""
    if find_spec("flash_attn") is None or not takes_flash(dtype, block_size):
        return None
    from flash_attn import flash_attn_with_kvcache

    return FlashDecode(heads, kv_heads, head_dim, flash_attn_with_kvcache)


class FlashDecode:
    """flash-attn over a paged cache; ``attention`` is ``flash_attn_with_kvcache``."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, attention: Callable[..., Any]) -> None:
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._attention = attention

    def prepare(self, tables: torch.Tensor, contexts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tables.to(torch.int32), contexts.to(torch.int32)

    def attend(
        self, query: torch.Tensor, cache: torch.Tensor, prepared: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        rows, size = len(query), self._heads * self._head_dim
        blocks = cache.view(*cache.shape[:3], self._kv_heads, self._head_dim)
        result: torch.Tensor = self._attention(
            query[:, :size].view(rows, 1, self._heads, self._head_dim),
            blocks[:, 0],
            blocks[:, 1],
            cache_seqlens=prepared[1],
            block_table=prepared[0],
            causal=True,
        )
        return result.reshape(rows, size)
