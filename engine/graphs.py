"""Decoding in steps of fixed sizes, each recorded once as a CUDA graph and then replayed.

A step of one token per sequence launches some hundred small kernels, and on a GPU launching takes longer than
computing. A graph launches all of them at once, but only on the memory they were recorded with. So the inputs
of a step are copied into permanent buffers, padded to the next recorded size; a padding row is a sequence of
one token in a spare block.
"""

from typing import Any

import torch

from engine.attention import DecodeKernel, Plan, Singles
from engine.model import Decoder


def decode_sizes(most: int) -> list[int]:
    """The recorded sizes: powers of two, and ``most``. Reading the weights dominates a small step, so padding
    up to twice the rows costs little.
    """
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


class FixedDecode:
    """Steps of one token per sequence, without adapters, through permanent buffers. No sequence may use
    ``spare_block``. With ``record`` the steps are CUDA graphs; without it the same code runs directly, on any
    device.
    """

    def __init__(
        self,
        model: Decoder,
        kernel: DecodeKernel,
        cache: list[torch.Tensor],
        *,
        max_num_seqs: int,
        max_blocks: int,
        spare_block: int,
        record: bool,
    ) -> None:
        self._model, self._kernel, self._cache = model, kernel, cache
        self._padding = (0, 0, spare_block * cache[0].shape[2], spare_block, 1)
        self._sizes = decode_sizes(max_num_seqs)
        # A buffer of the largest size for each input of a step: tokens, positions, slots, tables, contexts.
        shapes = (*[(max_num_seqs,)] * 3, (max_num_seqs, max_blocks), (max_num_seqs,))
        self._inputs = [torch.zeros(one, dtype=torch.int64, device=model.device) for one in shapes]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        if record:
            self._record()

    def run(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The logits of a step, one row per sequence; inputs: tokens, positions, slots, tables, contexts."""
        count = len(inputs[0])
        size = next(one for one in self._sizes if one >= count)
        for buffer, given, filler in zip(self._inputs, inputs, self._padding, strict=True):
            buffer[:count].copy_(given, non_blocking=True)
            buffer[count:size].fill_(filler)
        if size not in self._graphs:
            return self._compute(size)[:count]
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]

    def _compute(self, size: int) -> torch.Tensor:
        tokens, positions, slots, tables, contexts = (buffer[:size] for buffer in self._inputs)
        plan: Plan = [Singles(slice(0, size), self._kernel.prepare(tables, contexts))]
        return self._model.logits(self._model.forward(tokens, positions, slots, plan, self._cache))

    def _record(self) -> None:
        """Record each size, the largest first, so that the others reuse its memory."""
        for buffer, filler in zip(self._inputs, self._padding, strict=True):
            buffer.fill_(filler)
        pool = None
        for size in reversed(self._sizes):
            self._warm_up(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._compute(size)
            pool = pool or graph.pool()
            self._graphs[size] = (graph, logits)

    def _warm_up(self, size: int) -> None:
        """Run a step on another stream, as CUDA requires, for set-up that must not happen in recording."""
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(size)
        torch.cuda.current_stream().wait_stream(stream)
