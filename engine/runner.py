"""From scheduled chunks to tokens: flattens the batch, runs the model once, samples once.

The block table of every running sequence is kept in one array, a row each, and only new blocks are copied
into it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from engine.attention import Group, IntArray, build_group, group_by_shape
from engine.model import LlamaModel, new_cache
from engine.sampler import Draw, sample
from engine.scheduler import Chunk


class OutOfMemory(Exception):
    """The device had no memory for a step; nothing of the step counts."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """``tokens[i]`` was sampled for chunk i, or is None; ``failed`` are the chunks with a NaN or infinity."""

    tokens: list[int | None]
    failed: frozenset[int]


class Runner(Protocol):
    """What the engine needs: runs chunks as one step; raises OutOfMemory with nothing done."""

    def run(self, chunks: Seq[Chunk]) -> StepResult:
        """Computes all chunks, and samples a token for each that is its sequence's last."""
        ...


class ModelRunner:
    """Runs a model over a paged cache."""

    def __init__(
        self, model: LlamaModel, *, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._cache = new_cache(model.config, num_blocks, block_size, model)
        self._tables: IntArray = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int64)
        self._table_source: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._table_filled = [0] * max_num_seqs

    def run(self, chunks: Seq[Chunk]) -> StepResult:
        """See ``Runner.run``."""
        try:
            with torch.inference_mode():
                return self._run(chunks)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(str(error)) from error
        except RuntimeError as error:
            if "DefaultCPUAllocator" in str(error):  # the CPU allocator has no exception class of its own
                raise OutOfMemory(str(error)) from error
            raise

    def _run(self, chunks: Seq[Chunk]) -> StepResult:
        for chunk in chunks:
            self._update_table(chunk)
        members = group_by_shape([c.length for c in chunks], [c.start + c.length for c in chunks])
        order = list(chain.from_iterable(members))
        ordered = [chunks[index] for index in order]

        rows = np.array([chunk.sequence.row for chunk in ordered])
        starts = np.array([chunk.start for chunk in ordered])
        lengths = np.array([chunk.length for chunk in ordered])
        ends = np.cumsum(lengths)
        tokens = [t for c in ordered for t in c.sequence.token_ids[c.start : c.start + c.length]]
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths - starts, lengths)
        blocks = self._tables[np.repeat(rows, lengths), positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size

        hidden = self._model.forward(
            torch.tensor(tokens, device=self._model.device),
            torch.from_numpy(positions).to(self._model.device),
            torch.from_numpy(slots).to(self._model.device),
            self._build_groups(members, rows, starts, lengths),
            self._cache,
        )
        failed = self._find_failed(hidden, lengths)
        sampling = [at for at, chunk in enumerate(ordered) if chunk.is_last and at not in failed]
        results: list[int | None] = [None] * len(chunks)
        if sampling:
            last = torch.from_numpy(ends[sampling] - 1).to(self._model.device)
            logits = self._model.logits(hidden.index_select(0, last))
            failed.update(sampling[row] for row in _rows_not_finite(logits))
            if failed:
                logits = logits.nan_to_num(0.0, 0.0, 0.0)
            draws = [_draw_of(ordered[at]) for at in sampling]
            for at, token in zip(sampling, sample(logits, draws), strict=True):
                results[order[at]] = None if at in failed else token
        for at in failed:
            self._scrub(ordered[at].sequence.blocks)
        return StepResult(results, frozenset(order[at] for at in failed))

    def _build_groups(
        self, members: list[list[int]], rows: IntArray, starts: IntArray, lengths: IntArray
    ) -> list[Group]:
        groups, first, query = [], 0, 0
        for group in members:
            part = slice(first, first + len(group))
            groups.append(
                build_group(
                    query,
                    lengths[part],
                    starts[part] + lengths[part],
                    self._tables[rows[part]],
                    self._block_size,
                    self._model.dtype,
                    self._model.device,
                )
            )
            first, query = part.stop, groups[-1].queries.stop
        return groups

    def _update_table(self, chunk: Chunk) -> None:
        blocks, row = chunk.sequence.blocks, chunk.sequence.row
        if self._table_source[row] is not blocks:
            self._table_source[row] = blocks
            self._table_filled[row] = 0
            self._tables[row] = 0  # the null block
        filled = self._table_filled[row]
        if filled < len(blocks):
            self._tables[row, filled : len(blocks)] = blocks[filled:]
            self._table_filled[row] = len(blocks)

    def _scrub(self, blocks: list[int]) -> None:
        """Zeroes blocks that may hold a NaN: even masked it would spoil the sequence that has them next."""
        for layer in self._cache:
            layer[blocks] = 0

    @staticmethod
    def _find_failed(hidden: torch.Tensor, lengths: IntArray) -> set[int]:
        """Positions of the chunks in which a token's hidden state is not finite.

        A token attends to itself, so a bad key or value shows in the same step in the hidden state of its own
        token.
        """
        bad = _rows_not_finite(hidden)
        if not bad:
            return set()
        owners = np.repeat(np.arange(len(lengths)), lengths)
        return {int(owners[row]) for row in bad}


def _rows_not_finite(values: torch.Tensor) -> list[int]:
    # A sum is finite only if all its terms are; one pass, no intermediate of the size of the input.
    finite = torch.isfinite(values.sum(dim=-1, dtype=torch.float32))
    if bool(finite.all()):
        return []
    rows: list[int] = (~finite).nonzero().squeeze(1).tolist()
    return rows


def _draw_of(chunk: Chunk) -> Draw:
    return Draw(chunk.sequence.request.sampling, chunk.sequence.seed, chunk.sequence.num_output)
