"""Attention for one query per sequence on CUDA, without copying blocks.

flash-attn reads a block table directly, in half precision and for blocks of a multiple of 256 tokens.
FlexAttention, which PyTorch compiles into one kernel, uses a mask: the whole cache is one sequence of keys,
and a query attends to those of its own blocks. Where neither runs, blocks are gathered (``attention``).
No code here copies from or waits for the host, so that a CUDA graph can contain it.
"""

from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.attention import DecodeKernel

# Block sizes: a multiple of this for flash-attn 2; at least this for FlexAttention's Triton products.
FLASH_BLOCK_MULTIPLE = 256
FLEX_LEAST_BLOCK = 16
# Queries per block of FlexAttention's mask (its default); a sequence has only one query.
_MASK_QUERIES = 128
# Most FlexAttention kernels that a process may compile: one for each power of two of rows.
_MOST_KERNELS = 64


class Kernel(StrEnum):
    """The implementation of attention for sequences with one query."""

    FLASH = "flash-attn"
    FLEX = "FlexAttention"
    GATHER = "SDPA over gathered blocks"


def choose_kernel(device: str, dtype: torch.dtype, block_size: int, *, has_flash: bool) -> Kernel:
    """The fastest kernel that supports this type of device, dtype and block size."""
    if device != "cuda":
        return Kernel.GATHER
    if has_flash and dtype in (torch.float16, torch.bfloat16) and block_size % FLASH_BLOCK_MULTIPLE == 0:
        return Kernel.FLASH
    is_power_of_two = block_size & (block_size - 1) == 0
    return Kernel.FLEX if is_power_of_two and block_size >= FLEX_LEAST_BLOCK else Kernel.GATHER


def make_kernel(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    block_size: int,
    cache_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeKernel | None:
    """The kernel for this device and a cache of ``cache_blocks``; None if blocks must be gathered."""
    has_flash = find_spec("flash_attn") is not None
    kind = choose_kernel(device.type, dtype, block_size, has_flash=has_flash)
    if kind is Kernel.FLASH:
        from flash_attn import flash_attn_with_kvcache

        return FlashDecode(heads, kv_heads, head_dim, flash_attn_with_kvcache)
    if kind is Kernel.FLEX:
        from torch._dynamo import config  # this import takes two seconds, which a CPU engine saves

        # Only the kernel for short queries supports blocks this small; it is compiled per number of rows.
        config.recompile_limit = _MOST_KERNELS
        compiled = torch.compile(flex_attention, dynamic=False)
        return FlexDecode(heads, kv_heads, head_dim, block_size, cache_blocks, compiled)
    return None


class FlexDecode:
    """FlexAttention with a mask made from the block tables. ``attention`` is its compiled or its plain form.

    Rows are padded to a power of two, so that few kernels are compiled; a padding row attends to no key.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        cache_blocks: int,
        attention: Callable[..., Any],
    ) -> None:
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._block_size, self._cache_blocks = block_size, cache_blocks
        self._attention = attention

    def prepare(self, tables: torch.Tensor, contexts: torch.Tensor) -> BlockMask:
        """The mask: which keys of the whole cache each row attends to."""
        block_size, rows = self._block_size, 1 << (len(tables) - 1).bit_length()
        padding = rows - len(tables)
        tables, contexts = F.pad(tables, (0, 0, 0, padding)), F.pad(contexts, (0, padding))
        # For each row the place of every cache block in the row's table, -1 if it is not in it. Unused
        # entries of a table are the null block, which therefore gets a place after the last key.
        place = torch.full((rows, self._cache_blocks), -1, dtype=torch.int64, device=tables.device)
        place.scatter_(1, tables, torch.arange(tables.shape[1], device=tables.device).expand_as(tables))

        def sees(row: Any, head: Any, query: Any, key: Any) -> Any:
            block, offset = key // (2 * block_size), key % (2 * block_size)
            position = place[row, block] * block_size + offset
            return (offset < block_size) & (position >= 0) & (position < contexts[row])

        return BlockMask.from_kv_blocks(
            ((contexts + block_size - 1) // block_size).to(torch.int32).view(rows, 1, 1),
            (2 * tables).to(torch.int32).view(rows, 1, 1, -1),
            BLOCK_SIZE=(_MASK_QUERIES, block_size),
            mask_mod=sees,
            seq_lengths=(1, (2 * self._cache_blocks - 1) * block_size),
            compute_q_blocks=False,
        )

    def attend(self, query: torch.Tensor, cache: torch.Tensor, prepared: BlockMask) -> torch.Tensor:
        """See ``attention.DecodeKernel``."""
        size = self._heads * self._head_dim
        rows = prepared.kv_num_blocks.shape[0]
        padded = F.pad(query[:, :size], (0, 0, 0, rows - len(query)))
        # All keys and values as one sequence, a block's keys before its values. The view of the values begins
        # one block later, so that a key and its value have the same index in both views.
        tokens = cache.view(1, -1, self._kv_heads, self._head_dim).transpose(1, 2)
        result: torch.Tensor = self._attention(
            padded.view(rows, self._heads, 1, self._head_dim),
            tokens[:, :, : -self._block_size],
            tokens[:, :, self._block_size :],
            block_mask=prepared,
            enable_gqa=True,
        )
        return result.reshape(rows, size)[: len(query)]


class FlashDecode:
    """flash-attn over a paged cache; ``attention`` is ``flash_attn_with_kvcache``."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, attention: Callable[..., Any]) -> None:
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._attention = attention

    def prepare(self, tables: torch.Tensor, contexts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``attention.DecodeKernel``."""
        return tables.to(torch.int32), contexts.to(torch.int32)

    def attend(
        self, query: torch.Tensor, cache: torch.Tensor, prepared: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """See ``attention.DecodeKernel``."""
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
