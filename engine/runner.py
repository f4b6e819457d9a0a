"""Computes the tokens of scheduled chunks: flattens the batch, runs the model once, samples once.

The block table of every running sequence is a row of one array; a step copies only new blocks into it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from engine.attention import IntArray, Plan
from engine.graphs import FixedDecode
from engine.lora import AdapterBank, LoraBatch
from engine.memory import tells_of_no_memory
from engine.model import Decoder, Ends, new_cache
from engine.sampler import choose
from engine.scheduler import Chunk
from engine.threads import StepThreads
from engine.values import TokenIdLogprob

# oneDNN builds and keeps a kernel for each new number of rows; for the five products of the demo model that
# took at least 1.5 ms of a step of 10 ms. So the rows of steps with prompts are padded to a multiple of this.
_ROWS_MULTIPLE = 16


class OutOfMemory(Exception):
    """The device had no memory for a step; the step has no result."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """``tokens[i]`` was sampled for chunk i, or is None; ``failed`` are the chunks with a NaN or infinity;
    ``logprobs`` are the requested ones, by chunk. ``embeddings`` are the vectors of the chunks that complete
    a text to embed, see ``SequenceOutput.embedding``.
    """

    tokens: list[int | None]
    failed: frozenset[int]
    logprobs: dict[int, TokenIdLogprob] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)


class Runner(Protocol):
    """Runs chunks as one step; raises OutOfMemory, and then the step has no effect."""

    def run(self, chunks: Seq[Chunk]) -> StepResult:
        """Compute all chunks; for the last chunk of a sequence, sample a token or make its embedding."""


class ModelRunner:
    """Runs a model over a paged cache. With ``fixed_decode``, and if attention has a kernel, steps that only
    decode use ``graphs``. ``threads`` sets the number of threads for each step; without it the number is not
    changed.
    """

    def __init__(
        self,
        model: Decoder,
        adapters: AdapterBank,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        fixed_decode: bool = False,
        threads: StepThreads | None = None,
    ) -> None:
        self._model = model
        self._threads = threads
        self._adapters = adapters
        self._block_size = block_size
        # A block outside the pool, to which padding is written.
        self._spare_block = num_blocks + 1
        self._cache = new_cache(model.config, self._spare_block, block_size, model)
        self._tables: IntArray = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int64)
        self._table_source: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._table_filled = [0] * max_num_seqs
        self._fixed: FixedDecode | None = None
        if fixed_decode and (kernel := model.attention.kernel) is not None:
            with torch.inference_mode():
                self._fixed = FixedDecode(
                    model,
                    kernel,
                    self._cache,
                    max_num_seqs=max_num_seqs,
                    max_blocks=self._tables.shape[1],
                    spare_block=self._spare_block,
                    record=model.device.type == "cuda",
                )

    def run(self, chunks: Seq[Chunk]) -> StepResult:
        try:
            with torch.inference_mode():
                return self._run(chunks)
        except (MemoryError, RuntimeError) as error:
            if tells_of_no_memory(error):
                raise OutOfMemory(str(error)) from error
            raise

    def _run(self, chunks: Seq[Chunk]) -> StepResult:
        for chunk in chunks:
            self._update_table(chunk)
        members = self._model.attention.group_sequences([c.length for c in chunks], [c.end for c in chunks])
        order = list(chain.from_iterable(members))
        ordered = [chunks[index] for index in order]
        starts = np.array([chunk.start for chunk in ordered])
        logits, sums = self._compute(ordered, starts, [len(group) for group in members])
        # One row per chunk. Its last token attends to all tokens before it, so a NaN of any is here too, but
        # for what the last layer adds to them, which only an embedding has.
        failed = set(_rows_not_finite(logits))
        failed |= {at for at, total in sums.items() if not total.isfinite().all()}
        if failed:
            logits = logits.nan_to_num(0.0, 0.0, 0.0)
        sampling = [at for at, chunk in enumerate(ordered) if chunk.is_last and at not in sums]
        results: list[int | None] = [None] * len(chunks)
        logprobs: dict[int, TokenIdLogprob] = {}
        if sampling:
            if len(sampling) < len(ordered):
                logits = logits[sampling]
            chosen, entries = choose(logits, [ordered[at].sequence for at in sampling])
            logprobs = {order[sampling[row]]: entry for row, entry in entries.items()}
            for at, token in zip(sampling, chosen, strict=True):
                results[order[at]] = None if at in failed else token
        for at in failed:
            # Only from this chunk on: earlier blocks are finite, and other sequences may share them.
            self._scrub(ordered[at].sequence.blocks[starts[at] // self._block_size :])
        embeddings = {order[at]: _unit_vector(total) for at, total in sums.items() if ordered[at].is_last}
        for at, total in sums.items():
            ordered[at].sequence.hidden_sum = total
        return StepResult(results, frozenset(order[at] for at in failed), logprobs, embeddings)

    def _compute(
        self, chunks: list[Chunk], starts: IntArray, sizes: list[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The logits after the last token of each chunk, and the sums of hidden states of texts to embed.

        ``sizes`` are the numbers of chunks in each group of attention.
        """
        model, device = self._model, self._model.device
        tables = self._tables[[chunk.sequence.row for chunk in chunks]]
        lengths = np.array([chunk.length for chunk in chunks])
        ends = np.cumsum(lengths)
        token_ids = [t for c in chunks for t in c.sequence.token_ids[c.start : c.end]]
        places = np.arange(ends[-1]) - np.repeat(ends - lengths - starts, lengths)
        blocks = tables[np.repeat(np.arange(len(chunks)), lengths), places // self._block_size]
        slots = blocks * self._block_size + places % self._block_size
        contexts = starts + lengths
        if self._threads is not None:
            self._threads.take(len(token_ids), int(lengths @ contexts))
        lora = self._lora_batch(chunks, lengths)
        embeds = [at for at, chunk in enumerate(chunks) if chunk.sequence.request.embed]
        is_decode = len(token_ids) == len(chunks) and not embeds
        # No padding with adapters: their layout has no padding tokens.
        padding = 0 if is_decode or lora is not None else -len(token_ids) % _ROWS_MULTIPLE
        fillers = (0, 0, self._spare_block * self._block_size)
        inputs = [
            torch.from_numpy(np.concatenate([one, np.full(padding, filler)]))
            for one, filler in zip((token_ids, places, slots), fillers, strict=True)
        ]
        if self._fixed is not None and is_decode and lora is None:
            return self._fixed.run((*inputs, torch.from_numpy(tables), torch.from_numpy(contexts))), {}

        def plan(widths: IntArray) -> Plan:
            return model.attention.plan(widths, contexts, tables, sizes)

        ends_of_chunks = None
        if not is_decode and not embeds:
            ones = np.ones_like(lengths)
            rows = torch.from_numpy(ends - 1).to(device)
            ends_of_chunks = Ends(rows, plan(ones), self._lora_batch(chunks, ones))
        tokens, positions, written = (one.to(device) for one in inputs)
        hidden = model.forward(tokens, positions, written, plan(lengths), self._cache, lora, ends_of_chunks)
        if not embeds:
            return model.logits(hidden), {}
        sums = {}
        for at in embeds:
            total = hidden[ends[at] - lengths[at] : ends[at]].sum(dim=0, dtype=torch.float32)
            before = chunks[at].sequence.hidden_sum
            sums[at] = total if before is None or starts[at] == 0 else before + total
        return model.logits(hidden[torch.from_numpy(ends - 1).to(device)]), sums

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
        """Zero blocks that may hold a NaN: even masked, it would corrupt the next sequence that uses them."""
        for layer in self._cache:
            layer[blocks] = 0


def _rows_not_finite(values: torch.Tensor) -> list[int]:
    # A sum is finite only if all its terms are. This is one pass, without a temporary of the input's size.
    finite = torch.isfinite(values.sum(dim=-1, dtype=torch.float32))
    if bool(finite.all()):
        return []
    rows: list[int] = (~finite).nonzero().squeeze(1).tolist()
    return rows


def _unit_vector(total: torch.Tensor) -> bytes:
    """The normalised mean of the hidden states, from their sum, which has the same direction."""
    numbers = torch.nn.functional.normalize(total, dim=0).cpu().numpy()
    return numbers.astype("<f4").tobytes()
