"""Paged attention against attention written out for one sequence at a time."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import MOST_KEYS, attend, build_group, group_by_shape

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 4, 4, 2, 8

Shapes = list[tuple[int, int]]
# (new tokens, tokens computed before): answers, fresh prompts, prompts half computed.
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


@settings(max_examples=60, deadline=None)
@given(st.one_of(shapes, answers), st.randoms(use_true_random=False))
def test_every_group_of_sequences_attends_as_each_would_alone(sequences: Shapes, random: object) -> None:
    torch.manual_seed(len(sequences))
    widths, contexts = [new for new, _ in sequences], [new + before for new, before in sequences]
    needed = [-(-context // BLOCK_SIZE) for context in contexts]
    ids = list(range(1, sum(needed) + 1))
    random.shuffle(ids)  # type: ignore[attr-defined]
    cache = torch.randn(1 + len(ids), BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM)
    cache[0] = 0
    tables = np.zeros((len(sequences), max(needed)), dtype=np.int64)
    for row, count in enumerate(needed):
        tables[row, :count] = [ids.pop() for _ in range(count)]

    groups, queries, expected = [], [], []
    for members in group_by_shape(widths, contexts):
        first = sum(len(query) for query in queries)
        groups.append(
            build_group(
                first,
                np.array([widths[one] for one in members]),
                np.array([contexts[one] for one in members]),
                tables[members],
                BLOCK_SIZE,
                torch.float32,
                torch.device("cpu"),
            )
        )
        for one in members:
            queries.append(torch.randn(widths[one], HEADS, HEAD_DIM))
            known = cache[tables[one]].flatten(0, 1)[: contexts[one]]
            expected.append(write_out(queries[-1], known[:, 0], known[:, 1]))
    torch.testing.assert_close(attend(torch.cat(queries), cache, groups), torch.cat(expected))


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
