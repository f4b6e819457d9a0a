"""The operators of a step on CUDA in one kernel each, and paged attention for decoding, written in Triton.

PyTorch computes a norm, a rotation or an activation in several kernels. On an H100 a step of an 8B model with
one stream took 8.4 ms with 832 kernels, and takes 6.7 ms with 405. Each kernel here reads its inputs once and
writes its result once; ``operators`` and ``attention`` define the same in PyTorch. Sums are in float32.

Attention is split along the keys, so that few sequences keep the whole device busy: each program attends to
one part of one sequence's keys with all query heads that share them, and a second kernel joins the parts.
No code here copies from or waits for the host, so that a CUDA graph can contain it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from engine.operators import Operators

_LOG2_E = 1.4426950408889634
# Keys that a program of attention reads at once, and the programs that keep a device busy. On an H100 with 1,
# 32 and 128 streams 32 and 128 keys, and 1,024 and 2,048 programs, took as long or longer.
_KEYS = 64
_PROGRAMS = 512
_MOST_SPLITS = 64
# Triton's products have at least so many rows and columns.
_LEAST_TILE = 16
_GATE_COLUMNS = 1024


@triton.jit
def _add_and_norm(x, added, weight, out, eps, size, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row * size + at, mask=inside, other=0.0)
    if ADDS:
        value += tl.load(added + row * size + at, mask=inside, other=0.0)
        tl.store(x + row * size + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    scaled = wide * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, slots, cache, block_size, stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF)
    inside = at < SIZE // 2
    place = qkv + row * stride + head * SIZE + at
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + SIZE // 2, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        a, b = first.to(tl.float32), second.to(tl.float32)
        turned = cos + row * SIZE + at
        crossed = sin + row * SIZE + at
        # The first half of the sines is negated.
        rotated = a * tl.load(turned, mask=inside, other=0.0) + b * tl.load(crossed, mask=inside, other=0.0)
        turned, crossed = turned + SIZE // 2, crossed + SIZE // 2
        other = b * tl.load(turned, mask=inside, other=0.0) + a * tl.load(crossed, mask=inside, other=0.0)
        first, second = rotated.to(first.dtype), other.to(first.dtype)
        tl.store(place, first, mask=inside)
        tl.store(place + SIZE // 2, second, mask=inside)
    if head >= HEADS:
        slot = tl.load(slots + row)
        is_value = (head >= HEADS + KV_HEADS).to(tl.int64)
        key = slot + (slot // block_size + is_value) * block_size  # values follow a block after the keys
        stored = cache + (key * KV_HEADS + head - HEADS - is_value * KV_HEADS) * SIZE + at
        tl.store(stored, first, mask=inside)
        tl.store(stored + SIZE // 2, second, mask=inside)


@triton.jit
def _attend(
    query, cache, tables, contexts, sums, tops, totals, scale, block_size, splits, query_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Of one sequence, one head of keys and one part of the keys: the weighted sums of values, the highest
    score and the sum of weights of each query head.
    """
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    heads, at = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_head, inside = heads < GROUP, at < SIZE
    head = kv_head * GROUP + heads
    asked = query + row * query_stride + head[:, None] * SIZE + at[None, :]
    q = tl.load(asked, mask=is_head[:, None] & inside[None, :], other=0.0)
    context = tl.load(contexts + row)
    part = tl.cdiv(tl.cdiv(context, splits), KEYS) * KEYS
    end = tl.minimum(context, (split + 1) * part)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(split * part, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < end
        block = tl.load(tables + row * table_stride + key // block_size, mask=is_key, other=0)
        place = ((block * 2 * block_size + key % block_size) * KV_HEADS + kv_head) * SIZE
        read = is_key[:, None] & inside[None, :]
        keys = tl.load(cache + place[:, None] + at[None, :], mask=read, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - highest[:, None])
        shrunk = tl.exp2(top - highest)
        total = total * shrunk + tl.sum(weights, axis=1)
        after = block_size * KV_HEADS * SIZE
        values = tl.load(cache + after + place[:, None] + at[None, :], mask=read, other=0.0)
        products = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        result = result * shrunk[:, None] + products
        top = highest
    mine = (row * KV_HEADS * GROUP + head) * splits + split
    tl.store(tops + mine, top, mask=is_head)
    tl.store(totals + mine, total, mask=is_head)
    kept = is_head[:, None] & inside[None, :]
    tl.store(sums + mine[:, None] * SIZE + at[None, :], result, mask=kept)


@triton.jit
def _join(sums, tops, totals, out, SPLITS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """The parts of one query head of one sequence, joined."""
    one = tl.program_id(0).to(tl.int64)
    parts, at = tl.arange(0, SPLITS), tl.arange(0, COLUMNS)
    inside = at < SIZE
    top = tl.load(tops + one * SPLITS + parts)
    weight = tl.exp2(top - tl.max(top, axis=0))
    total = tl.sum(weight * tl.load(totals + one * SPLITS + parts), axis=0)
    read = sums + (one * SPLITS + parts)[:, None] * SIZE + at[None, :]
    value = tl.sum(weight[:, None] * tl.load(read, mask=inside[None, :], other=0.0), axis=0) / total
    tl.store(out + one * SIZE + at, value.to(out.dtype.element_ty), mask=inside)


class FusedOperators(Operators):
    """The operators in one kernel each, and paged attention for one query per sequence."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float, *, block_size: int) -> None:
        super().__init__(heads, kv_heads, head_dim, eps)
        self._heads, self._kv_heads, self._block_size = heads, kv_heads, block_size
        self._scale = _LOG2_E / head_dim**0.5
        self._columns = max(_LEAST_TILE, triton.next_power_of_2(head_dim))

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._norm(x, x, weight, adds=False)

    def add_and_norm(self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._norm(x, added, weight, adds=True)

    def _norm(
        self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, *, adds: bool
    ) -> torch.Tensor:
        rows, size = x.shape
        out = torch.empty_like(x)
        block = triton.next_power_of_2(size)
        _add_and_norm[(rows,)](
            *(x, added, weight, out, self.eps, size),
            ADDS=adds,
            BLOCK=block,
            num_warps=8 if block > 1024 else 4,
        )
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        _rotate_and_store[(len(qkv), self._heads + 2 * self._kv_heads)](
            *(qkv, cos, sin, slots, cache, self._block_size, qkv.stride(0)),
            HEADS=self._heads,
            KV_HEADS=self._kv_heads,
            SIZE=self.head_dim,
            HALF=triton.next_power_of_2(self.head_dim // 2),
            num_warps=1,
        )

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        _gate[(rows, triton.cdiv(size, _GATE_COLUMNS))](gate_up, out, size, BLOCK=_GATE_COLUMNS)
        return out

    def prepare(self, tables: torch.Tensor, contexts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tables, contexts

    def attend(
        self, query: torch.Tensor, cache: torch.Tensor, prepared: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        (tables, contexts), rows = prepared, len(query)
        splits = min(_MOST_SPLITS, triton.next_power_of_2(triton.cdiv(_PROGRAMS, rows * self._kv_heads)))
        wide: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
        sums = torch.empty(rows * self._heads, splits, self.head_dim, **wide)
        tops, totals = torch.empty(2, rows * self._heads, splits, **wide).unbind()
        out = query.new_empty(rows, self.query_size)
        group = self._heads // self._kv_heads
        _attend[(rows, self._kv_heads, splits)](
            *(query, cache, tables, contexts, sums, tops, totals, self._scale, self._block_size, splits),
            *(query.stride(0), tables.stride(0)),
            KV_HEADS=self._kv_heads,
            GROUP=group,
            SIZE=self.head_dim,
            ROWS=max(_LEAST_TILE, triton.next_power_of_2(group)),
            COLUMNS=self._columns,
            KEYS=_KEYS,
        )
        _join[(rows * self._heads,)](
            sums, tops, totals, out, SPLITS=splits, SIZE=self.head_dim, COLUMNS=self._columns
        )
        return out
