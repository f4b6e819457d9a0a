"""Paged attention, compared with a plain attention of one sequence at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import MOST_KEYS, DecodeKernel, GroupedAttention, IntArray, group_by_shape
from engine.kernels import CompiledOperators

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 4, 4, 2, 8
SHAPE = (HEADS, KV_HEADS, HEAD_DIM)

Shapes = list[tuple[int, int]]
# (new tokens, tokens computed before) of each sequence: answers, new prompts and half-computed prompts.
shapes = st.lists(st.tuples(st.integers(1, 150), st.integers(0, 150)), min_size=1, max_size=8)
answers = st.lists(st.tuples(st.just(1), st.integers(0, 300)), min_size=1, max_size=8)


def write_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens of one sequence: [new, heads, dim] over [all, kv heads, dim]."""
    new, known = len(query), len(key)
    key, value = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
    hidden = torch.arange(known) > torch.arange(known - new, known)[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(new, -1)


@dataclass
class Paged:
    """A KV cache, and sequences whose blocks lie in it in any order."""

    widths: list[int]
    contexts: list[int]
    cache: torch.Tensor
    tables: IntArray

    def expect(self, queries: list[torch.Tensor], order: list[int]) -> torch.Tensor:
        """Returns the plain attention of each sequence alone, concatenated in ``order``."""
        known = [
            self.cache[self.tables[one]].unflatten(-1, (KV_HEADS, HEAD_DIM)).transpose(0, 1).flatten(1, 2)
            for one in order
        ]
        parts = zip(queries, known, order, strict=True)
        return torch.cat(
            [
                write_out(query, one[0, : self.contexts[at]], one[1, : self.contexts[at]])
                for query, one, at in parts
            ]
        )


def spread(sequences: Shapes, shuffle: Callable[[list[int]], object]) -> Paged:
    torch.manual_seed(len(sequences))
    contexts = [new + before for new, before in sequences]
    needed = [-(-context // BLOCK_SIZE) for context in contexts]
    ids = list(range(1, sum(needed) + 1))
    shuffle(ids)
    cache = torch.randn(2 + len(ids), 2, BLOCK_SIZE, KV_HEADS * HEAD_DIM)
    cache[0] = 0
    tables = np.zeros((len(sequences), max(needed)), dtype=np.int64)
    for row, count in enumerate(needed):
        tables[row, :count] = [ids.pop() for _ in range(count)]
    return Paged([new for new, _ in sequences], contexts, cache, tables)


def plain(kernel: DecodeKernel | None) -> GroupedAttention:
    return GroupedAttention(
        *SHAPE, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu"), kernel=kernel
    )


def compiled() -> CompiledOperators:
    return CompiledOperators(*SHAPE, 1e-5, block_size=BLOCK_SIZE, threads=1)


@pytest.mark.parametrize("kernel", [None, compiled()], ids=["gathered", "compiled"])
@settings(max_examples=15, deadline=None)
@given(sequences=st.one_of(shapes, answers), random=st.randoms(use_true_random=False))
def test_every_group_of_sequences_attends_as_each_would_alone(
    kernel: DecodeKernel | None, sequences: Shapes, random: object
) -> None:
    paged, attention = spread(sequences, random.shuffle), plain(kernel)  # type: ignore[attr-defined]
    members = attention.group_sequences(paged.widths, paged.contexts)
    order = [one for group in members for one in group]
    widths = np.array([paged.widths[one] for one in order])
    contexts = np.array([paged.contexts[one] for one in order])
    plan = attention.plan(widths, contexts, paged.tables[order], [len(group) for group in members])
    queries = [torch.randn(paged.widths[one], HEADS, HEAD_DIM) for one in order]
    # The rest of a row, keys and values of the fused product, must be ignored: it is NaN.
    fused = torch.cat([torch.cat(queries).flatten(1), torch.full((int(widths.sum()), 3), torch.nan)], 1)
    attended = attention.attend(fused, paged.cache, plan)
    torch.testing.assert_close(attended, paged.expect(queries, order))


@settings(max_examples=15, deadline=None)
@given(sequences=answers, random=st.randoms(use_true_random=False))
def test_a_kernel_for_answers_reads_each_sequences_own_blocks(sequences: Shapes, random: object) -> None:
    paged = spread(sequences, random.shuffle)  # type: ignore[attr-defined]
    kernel = compiled()
    prepared = kernel.prepare(torch.from_numpy(paged.tables), torch.tensor(paged.contexts))
    queries = torch.randn(len(sequences), HEADS, HEAD_DIM)
    attended = kernel.attend(queries.flatten(1), paged.cache, prepared)
    expected = paged.expect(list(queries.unsqueeze(1)), list(range(len(sequences))))
    torch.testing.assert_close(attended, expected)


@given(st.one_of(shapes, answers), st.integers(1, 600))
def test_groups_hold_each_sequence_once_and_no_more_keys_than_asked(sequences: Shapes, most: int) -> None:
    widths, contexts = [new for new, _ in sequences], [new + before for new, before in sequences]
    groups = group_by_shape(widths, contexts, most)
    assert sorted(one for group in groups for one in group) == list(range(len(sequences)))
    assert all(
        len(group) == 1 or len(group) * max(contexts[one] for one in group) <= most for group in groups
    )


def test_many_long_sequences_are_gathered_in_parts_that_fit_the_processors_cache() -> None:
    groups = group_by_shape([1] * 64, [224] * 64)
    assert len(groups) == 4
    assert all(len(group) * 224 <= MOST_KEYS for group in groups)
    assert len(group_by_shape([1] * 64, [60] * 64)) == 1
