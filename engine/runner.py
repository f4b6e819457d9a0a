"""From scheduled chunks to tokens: flattens the batch, runs the model once, samples once.

The block table of every running sequence is kept in one array, a row each, and only new blocks are copied
into it.
"""

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from engine.attention import MOST_KEYS, Group, IntArray, build_group, group_by_shape
from engine.lora import AdapterBank, LoraBatch
from engine.model import Decoder, Ends, new_cache
from engine.sampler import Draw, choose
from engine.scheduler import Chunk
from engine.values import TokenLogprob

# What PyTorch's CPU allocator and oneDNN say: neither has an exception class of its own. oneDNN names no
# cause, but it has run the same products with another number of rows when the engine warmed up.
_SIGNS_OF_NO_MEMORY = ("DefaultCPUAllocator", "could not create a primitive", "could not create a memory")


class OutOfMemory(Exception):
    """The device had no memory for a step; nothing of the step counts."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """``tokens[i]`` was sampled for chunk i, or is None; ``failed`` are the chunks with a NaN or infinity;
    ``logprobs`` has what was asked for, by chunk.
    """

    tokens: list[int | None]
    failed: frozenset[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)


class Runner(Protocol):
    """What the engine needs: runs chunks as one step; raises OutOfMemory with nothing done."""

    def run(self, chunks: Seq[Chunk]) -> StepResult:
        """Computes all chunks, and samples a token for each that is its sequence's last."""
        ...


class ModelRunner:
    """Runs a model over a paged cache."""

    def __init__(
        self,
        model: Decoder,
        adapters: AdapterBank,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._block_size = block_size
        self._cache = new_cache(model.config, num_blocks, block_size, model)
        self._tables: IntArray = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int64)
        self._table_source: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._table_filled = [0] * max_num_seqs
        self._most_keys = MOST_KEYS if model.device.type == "cpu" else sys.maxsize

    def run(self, chunks: Seq[Chunk]) -> StepResult:
        """See ``Runner.run``."""
        try:
            with torch.inference_mode():
                return self._run(chunks)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(str(error)) from error
        except RuntimeError as error:
            if any(sign in str(error) for sign in _SIGNS_OF_NO_MEMORY):
                raise OutOfMemory(str(error)) from error
            raise

    def _run(self, chunks: Seq[Chunk]) -> StepResult:
        for chunk in chunks:
            self._update_table(chunk)
        members = group_by_shape(
            [c.length for c in chunks], [c.start + c.length for c in chunks], self._most_keys
        )
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

        ends_of_chunks = None
        if len(tokens) > len(ordered):
            ones = np.ones_like(lengths)
            ends_of_chunks = Ends(
                torch.from_numpy(ends - 1).to(self._model.device),
                self._build_groups(members, rows, starts + lengths - 1, ones),
                self._lora_batch(ordered, ones),
            )
        hidden = self._model.forward(
            torch.tensor(tokens, device=self._model.device),
            torch.from_numpy(positions).to(self._model.device),
            torch.from_numpy(slots).to(self._model.device),
            self._build_groups(members, rows, starts, lengths),
            self._cache,
            self._lora_batch(ordered, lengths),
            ends_of_chunks,
        )
        # One row a chunk. A chunk's last token attends to all before it, so a NaN of any of them is here too.
        logits = self._model.logits(hidden)
        failed = set(_rows_not_finite(logits))
        if failed:
            logits = logits.nan_to_num(0.0, 0.0, 0.0)
        sampling = [at for at, chunk in enumerate(ordered) if chunk.is_last]
        results: list[int | None] = [None] * len(chunks)
        logprobs: dict[int, TokenLogprob] = {}
        if sampling:
            if len(sampling) < len(ordered):
                logits = logits[sampling]
            chosen, entries = choose(logits, [_draw_of(ordered[at]) for at in sampling])
            logprobs = {order[sampling[row]]: entry for row, entry in entries.items()}
            for at, token in zip(sampling, chosen, strict=True):
                results[order[at]] = None if at in failed else token
        for at in failed:
            # Earlier blocks are finite, and other sequences may share them.
            self._scrub(ordered[at].sequence.blocks[starts[at] // self._block_size :])
        return StepResult(results, frozenset(order[at] for at in failed), logprobs)

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

    def _lora_batch(self, chunks: list[Chunk], lengths: IntArray) -> LoraBatch | None:
        if self._adapters.is_empty:
            return None
        owners = [chunk.sequence.adapter for chunk in chunks]
        return self._adapters.batch(owners, lengths.tolist(), self._model.device)

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


def _rows_not_finite(values: torch.Tensor) -> list[int]:
    # A sum is finite only if all its terms are; one pass, no intermediate of the size of the input.
    finite = torch.isfinite(values.sum(dim=-1, dtype=torch.float32))
    if bool(finite.all()):
        return []
    rows: list[int] = (~finite).nonzero().squeeze(1).tolist()
    return rows


def _draw_of(chunk: Chunk) -> Draw:
    one = chunk.sequence
    return Draw(one.request.sampling, one.seed, one.num_output, one.adjustments, one.matcher)
