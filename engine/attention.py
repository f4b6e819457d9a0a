"""Paged attention in vectorised PyTorch.

Keys and values of a token are at ``position % block_size`` of one of its sequence's blocks. The blocks of a
sequence are gathered in the order of its block table, and PyTorch's fused attention runs over them. The
sequences of a step differ in length, so they are grouped, and each group is padded to one shape [rows,
queries, keys]; the batch is flattened group by group.

    widths (queries)   37 64 | 1 1 1 1 | 1 1
    contexts (keys)    37 64 | 9 9 8 7 | 300
    groups             - 0 -   -- 1 --   -2-

Where a kernel reads blocks in place (``kernels`` on the CPU, ``fused`` on CUDA), all sequences with one
query, which are the decoding ones, form the last group, without copying and padding.
"""

import sys
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

# In query-key pairs: the most padding that a group may add before a separate group is cheaper, and the cost
# of gathering one key. Measured on two cores with two key-value heads of 64.
_GROUP_COST = 1_000
_GATHER_COST = 4
# The first on a GPU, where a group costs the launch of some ten kernels in each layer.
_GROUP_COST_ON_GPU = 500_000
# The most keys that a group gathers on a CPU: they should still be in the processor's cache when attention
# reads them. 64 sequences of 224 keys took 9.8 ms for five layers in one group and 6.5 ms in four.
MOST_KEYS = 4_096
# Queries that share one call, and so one number of keys: with fewer, less is computed and then hidden by the
# causal mask. Both 64 and 32 took a third off the attention of 180 to 512 new tokens, 128 took a quarter off.
_QUERIES_AT_ONCE = 64
# The same on a GPU, where a call costs more than what is computed and then hidden.
_QUERIES_AT_ONCE_ON_GPU = 1024

IntArray = npt.NDArray[np.int64]


class DecodeKernel(Protocol):
    """Attention for one query per sequence that reads the blocks in place."""

    def prepare(self, tables: torch.Tensor, contexts: torch.Tensor) -> Any:
        """Prepare, once for all layers of a step, from block tables [rows, blocks] and key counts."""

    def attend(self, query: torch.Tensor, cache: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Attend: query [rows, heads * head_dim or more], the rest ignored → [rows, heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some queries of a group, which attend to its first ``keys`` keys; ``mask`` is added to the scores, None
    when they attend to all of these keys.
    """

    queries: slice
    keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Group:
    """``rows`` sequences of similar shape, padded to ``width`` queries each. ``queries`` is their slice of
    the flattened batch; ``blocks`` are the indices of their keys in the cache, then those of their values.
    ``pad`` maps [rows * width] to rows of that slice and ``unpad`` maps back; both are None when no query is
    padded.
    """

    queries: slice
    rows: int
    width: int
    blocks: torch.Tensor
    parts: tuple[Part, ...]
    pad: torch.Tensor | None = None
    unpad: torch.Tensor | None = None


def group_by_shape(
    widths: list[int], contexts: list[int], most_keys: int = MOST_KEYS, most_waste: int = _GROUP_COST
) -> list[list[int]]:
    """Group sequences by their query and key counts, so that a group's padding wastes at most ``most_waste``
    and it gathers at most ``most_keys`` keys, unless one sequence alone has more.
    """
    order = sorted(range(len(widths)), key=lambda one: (widths[one], contexts[one]), reverse=True)
    groups: list[list[int]] = []
    width = longest = useful = 0
    for one in order:
        exact = contexts[one] * (widths[one] + _GATHER_COST)
        if groups:
            keys = (len(groups[-1]) + 1) * max(longest, contexts[one])
            waste = keys * (width + _GATHER_COST) - useful - exact
        if not groups or keys > most_keys or waste > most_waste:
            groups.append([])
            width, longest, useful = widths[one], 0, 0
        groups[-1].append(one)
        longest, useful = max(longest, contexts[one]), useful + exact
    return groups


@dataclass(frozen=True, slots=True)
class Singles:
    """All sequences with one query; ``prepared`` is the kernel's preparation of the step."""

    queries: slice
    prepared: Any


Plan = list[Group | Singles]


class GroupedAttention:
    """Attention on any device. ``kernel``, if given, computes the sequences with one query."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernel: DecodeKernel | None = None,
    ) -> None:
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._block_size, self._dtype, self._device = block_size, dtype, device
        self.kernel = kernel
        self._most_keys = MOST_KEYS if device.type == "cpu" else sys.maxsize
        self._at_once = _QUERIES_AT_ONCE if device.type == "cpu" else _QUERIES_AT_ONCE_ON_GPU
        self._group_cost = _GROUP_COST if device.type == "cpu" else _GROUP_COST_ON_GPU
        # On a GPU no fused kernel of PyTorch but cuDNN's takes a mask together with heads that share keys.
        self._repeats = 1 if device.type == "cpu" else heads // kv_heads

    def group_sequences(self, widths: list[int], contexts: list[int]) -> list[list[int]]:
        if self.kernel is None:
            return group_by_shape(widths, contexts, self._most_keys, self._group_cost)
        singles = [one for one, width in enumerate(widths) if width == 1]
        wide = [one for one, width in enumerate(widths) if width > 1]
        groups = group_by_shape(
            [widths[one] for one in wide],
            [contexts[one] for one in wide],
            self._most_keys,
            self._group_cost,
        )
        return [[wide[one] for one in group] for group in groups] + ([singles] if singles else [])

    def plan(self, widths: IntArray, contexts: IntArray, tables: IntArray, sizes: list[int]) -> Plan:
        """Prepare the groups of a step, or of its last layer, which computes one query per sequence.

        In the order of the flattened batch: query counts, key counts (new keys included) and block tables of
        the sequences; ``sizes`` are the numbers of sequences in each group.
        """
        only_singles = self.kernel is not None and widths.max() == 1
        bounds = [0, len(widths)] if only_singles else [0, *accumulate(sizes)]
        plan: Plan = []
        first_query = 0
        for first, end in pairwise(bounds):
            of_group = slice(first, end)
            queries = slice(first_query, first_query + int(widths[of_group].sum()))
            if self.kernel is not None and widths[of_group].max() == 1:
                arrays = (torch.from_numpy(one[of_group]).to(self._device) for one in (tables, contexts))
                plan.append(Singles(queries, self.kernel.prepare(*arrays)))
            else:
                plan.append(self._group(queries, widths[of_group], contexts[of_group], tables[of_group]))
            first_query = queries.stop
        return plan

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Attention of the flattened batch over one layer's cache.

        ``query`` is [tokens, heads * head_dim or more], the rest ignored; ``cache`` is [blocks, 2,
        block_size, kv_heads * head_dim] and has the keys and values of this step. Returns [tokens, heads *
        head_dim], with zeros for tokens after those of the plan.
        """
        parts = []
        for group in plan:
            queries = query[group.queries]
            if isinstance(group, Group):
                parts.append(self._attend_group(queries, cache, group))
            else:
                assert self.kernel is not None  # it has prepared them
                parts.append(self.kernel.attend(queries, cache, group.prepared))
        if (padding := len(query) - plan[-1].queries.stop) > 0:
            parts.append(query.new_zeros(padding, self._heads * self._head_dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _group(self, queries: slice, widths: IntArray, contexts: IntArray, tables: IntArray) -> Group:
        rows, width = len(widths), int(widths.max())
        num_blocks = -(-int(contexts.max()) // self._block_size)
        keys_at = 2 * tables[:, :num_blocks].reshape(-1)
        blocks = torch.from_numpy(np.concatenate([keys_at, keys_at + 1])).to(self._device)

        pad = unpad = None
        if queries.stop - queries.start < rows * width:
            real = np.arange(width) < widths[:, None]
            unpad = torch.from_numpy(np.flatnonzero(real)).to(self._device)
            place = np.where(real, np.cumsum(real).reshape(real.shape) - 1, 0)
            pad = torch.from_numpy(place.reshape(-1)).to(self._device)

        starts = contexts - widths
        if (starts == starts[0]).all():
            starts = starts[:1]  # one mask for all rows
        parts = []
        for begin in range(0, width, self._at_once):
            end = min(begin + self._at_once, width)
            # A query attends to the keys up to its own position. A padding query attends to at least the keys
            # of the last real one, never to none, so that no row of the softmax is empty.
            seen = (starts[:, None] + np.arange(begin, end))[:, None, :, None]
            keys = min(int(starts.max()) + end, num_blocks * self._block_size)
            hidden = np.arange(keys) > seen
            mask = None
            if hidden.any():
                mask = torch.zeros(hidden.shape, dtype=self._dtype)
                mask = mask.masked_fill_(torch.from_numpy(hidden), -torch.inf).to(self._device)
            parts.append(Part(slice(begin, end), keys, mask))
        return Group(queries, rows, width, blocks, tuple(parts), pad, unpad)

    def _attend_group(self, query: torch.Tensor, cache: torch.Tensor, group: Group) -> torch.Tensor:
        rows, width, kv_heads, head_dim = group.rows, group.width, self._kv_heads, self._head_dim
        gathered = cache.flatten(0, 1).index_select(0, group.blocks)
        key, value = gathered.view(2, rows, -1, kv_heads, head_dim).transpose(2, 3)
        if group.pad is not None:
            query = query.index_select(0, group.pad)
        query = query[:, : self._heads * head_dim]
        if width == 1:
            # The query heads that share a key-value head become its queries, so that no key is repeated.
            folded = query.reshape(rows, kv_heads, -1, head_dim)
            keys, mask = group.parts[0].keys, group.parts[0].mask
            result = F.scaled_dot_product_attention(folded, key[:, :, :keys], value[:, :, :keys], mask)
            return result.reshape(rows, -1)
        padded = query.view(rows, width, -1, head_dim).transpose(1, 2)
        if self._repeats > 1:
            key, value = (one.repeat_interleave(self._repeats, dim=1) for one in (key, value))
        results = [
            F.scaled_dot_product_attention(
                padded[:, :, part.queries],
                key[:, :, : part.keys],
                value[:, :, : part.keys],
                part.mask,
                enable_gqa=self._repeats == 1,
            ).transpose(1, 2)
            for part in group.parts
        ]
        flat = torch.cat(results, dim=1).view(rows * width, -1)
        return flat if group.unpad is None else flat.index_select(0, group.unpad)
