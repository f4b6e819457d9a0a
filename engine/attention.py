"""Paged attention in vectorised PyTorch.

Keys and values of a token live in the slot ``block * block_size + offset`` of a layer's cache. To attend, the
blocks of a sequence are gathered side by side, in the order of its block table, and the fused attention of
PyTorch runs over them.

The sequences of a step differ in length, so they are put into groups that are each padded to one shape
[rows, queries, keys]. The batch is flattened group by group; a group's queries are then one slice of it.

    widths (queries)   1 1 1 1 | 1 1 | 37 64
    contexts (keys)    9 9 8 7 | 300 | 37 64
    groups             -- 0 --   -1-   - 2 -
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

# What a group is allowed to waste by padding before a group of its own is cheaper, in query-key pairs, and
# what gathering one key costs in the same unit. Measured on two cores with two key-value heads of 64.
_GROUP_COST = 1_000
_GATHER_COST = 4
# The most keys that a group gathers on a CPU: what is gathered should still be in the processor's cache when
# attention reads it. 64 sequences of 224 keys took 9.8 ms for five layers in one group and 6.5 ms in four.
MOST_KEYS = 4_096
# Queries that share one call, and so one number of keys: the fewer, the less is computed that the causal
# order hides. Both 64 and 32 took a third off the attention of 180 to 512 fresh tokens, 128 a quarter.
_QUERIES_AT_ONCE = 64

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a group's queries, which see its first ``keys`` keys; ``mask`` is added to the scores, None
    when they see all of these.
    """

    queries: slice
    keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of similar shape: ``rows`` sequences, padded to ``width`` queries each.

    ``queries`` is their slice of the flattened batch; ``blocks`` their block tables, one after the other.
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


def group_by_shape(widths: list[int], contexts: list[int], most_keys: int = MOST_KEYS) -> list[list[int]]:
    """Partitions sequences, given their query and key counts, so that padding wastes little and a group
    gathers at most ``most_keys`` keys, unless one sequence alone has more.
    """
    order = sorted(range(len(widths)), key=lambda one: (widths[one], contexts[one]), reverse=True)
    groups: list[list[int]] = []
    width = longest = useful = 0
    for one in order:
        exact = contexts[one] * (widths[one] + _GATHER_COST)
        if groups:
            keys = (len(groups[-1]) + 1) * max(longest, contexts[one])
            waste = keys * (width + _GATHER_COST) - useful - exact
        if not groups or keys > most_keys or waste > _GROUP_COST:
            groups.append([])
            width, longest, useful = widths[one], 0, 0
        groups[-1].append(one)
        longest, useful = max(longest, contexts[one]), useful + exact
    return groups


def build_group(
    first_query: int,
    widths: IntArray,
    contexts: IntArray,
    tables: IntArray,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Group:
    """Prepares one group: ``tables`` holds its block table rows; the context counts the new tokens too."""
    rows, width = len(widths), int(widths.max())
    num_blocks = -(-int(contexts.max()) // block_size)
    queries = slice(first_query, first_query + int(widths.sum()))
    blocks = torch.from_numpy(tables[:, :num_blocks].reshape(-1)).to(device)

    pad = unpad = None
    if queries.stop - queries.start < rows * width:
        real = np.arange(width) < widths[:, None]
        unpad = torch.from_numpy(np.flatnonzero(real)).to(device)
        place = np.where(real, np.cumsum(real).reshape(real.shape) - 1, 0)
        pad = torch.from_numpy(place.reshape(-1)).to(device)

    starts = contexts - widths
    if (starts == starts[0]).all():
        starts = starts[:1]  # one mask for all rows
    parts = []
    for begin in range(0, width, _QUERIES_AT_ONCE):
        end = min(begin + _QUERIES_AT_ONCE, width)
        # A query sees the keys up to its own position; a padded one sees what the last real one sees or more,
        # never nothing, so that no row of the softmax is empty.
        seen = (starts[:, None] + np.arange(begin, end))[:, None, :, None]
        keys = min(int(starts.max()) + end, num_blocks * block_size)
        hidden = np.arange(keys) > seen
        mask = None
        if hidden.any():
            mask = torch.zeros(hidden.shape, dtype=dtype)
            mask = mask.masked_fill_(torch.from_numpy(hidden), -torch.inf).to(device)
        parts.append(Part(slice(begin, end), keys, mask))
    return Group(queries, rows, width, blocks, tuple(parts), pad, unpad)


def attend(query: torch.Tensor, cache: torch.Tensor, groups: list[Group]) -> torch.Tensor:
    """Attention of the flattened batch over one layer's cache.

    ``query`` is [tokens, heads, head_dim], ``cache`` [blocks, block_size, 2, kv_heads, head_dim] with the
    keys and values of this step stored already. Returns [tokens, heads * head_dim].
    """
    parts = [_attend_group(query[group.queries], cache, group) for group in groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_group(query: torch.Tensor, cache: torch.Tensor, group: Group) -> torch.Tensor:
    kv_heads, head_dim = cache.shape[-2:]
    gathered = cache.index_select(0, group.blocks).view(group.rows, -1, 2, kv_heads, head_dim)
    key, value = gathered[:, : group.parts[-1].keys].permute(2, 0, 3, 1, 4)
    if group.width == 1:
        # The query heads that share a key-value head become the queries of that head: no key is repeated.
        folded = query.reshape(group.rows, kv_heads, -1, head_dim)
        return F.scaled_dot_product_attention(folded, key, value, group.parts[0].mask).reshape(group.rows, -1)
    if group.pad is not None:
        query = query.index_select(0, group.pad)
    padded = query.reshape(group.rows, group.width, -1, head_dim).transpose(1, 2)
    results = [
        F.scaled_dot_product_attention(
            padded[:, :, part.queries],
            key[:, :, : part.keys],
            value[:, :, : part.keys],
            part.mask,
            enable_gqa=True,
        ).transpose(1, 2)
        for part in group.parts
    ]
    result = results[0] if len(results) == 1 else torch.cat(results, dim=1)
    flat = result.reshape(group.rows * group.width, -1)
    return flat if group.unpad is None else flat.index_select(0, group.unpad)
