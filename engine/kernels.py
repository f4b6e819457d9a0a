"""The loops of a float32 step on the CPU for which PyTorch has no single operator, compiled by Numba.

PyTorch attends over blocks only after copying them, and computes a norm, a rotation or an activation in
several passes. Each loop here reads its inputs once and writes its result once; ``operators`` and
``attention`` define the same in PyTorch. The model's shape is a constant in the compiled code, so that inner
loops are unrolled. Compiled code is cached on disk next to this file, or in the user's cache folder.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from engine.operators import Operators

# The permitted floating-point optimisations. "nnan" (there is no NaN) is left out: a NaN must be detected.
_FAST = {"reassoc", "contract", "arcp", "nsz"}
_LOG2_E = np.float32(1.4426950408889634)
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
# Lower than any score, and finite, so that the difference of two such values is not NaN.
_NO_SCORE = np.float32(-1e30)
# The smallest and largest exponent of a normal float32.
_LEAST_POWER, _MOST_POWER = np.float32(-126.0), np.float32(127.0)
# log(2)**n / n!: the series of 2**x; with these terms its error is below 2e-7 for x from -0.5 to 0.5.
_C1, _C2, _C3 = np.float32(0.6931471806), np.float32(0.2402265070), np.float32(0.0555041087)
_C4, _C5, _C6 = np.float32(0.0096181291), np.float32(0.0013333558), np.float32(0.0001540353)

Array = Any  # a float32 or int64 NumPy array, to Numba


class CompiledOperators(Operators):
    """The operators in one pass each, and paged attention for one query per sequence."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, eps: float, *, block_size: int, threads: int
    ) -> None:
        super().__init__(heads, kv_heads, head_dim, eps)
        shape = (heads, kv_heads, head_dim, block_size)
        self._of_one = self._of_all = self._loops = compile_loops(*shape, parallel=False)
        if threads > 1:
            _start_threads(threads)
            self._of_all = compile_loops(*shape, parallel=True)
        self._eps = np.float32(eps)

    def take_threads(self, *, all_of_them: bool) -> None:
        self._loops = self._of_all if all_of_them else self._of_one

    def compile_parallel(self) -> None:
        """Compile or load the parallel loops, if any: small steps, as in the warm-up, do not call them."""
        if self._of_all is self._of_one:
            return
        self.take_threads(all_of_them=True)
        rows, no_rows = torch.zeros(1, 2 * self.head_dim), torch.zeros(0, dtype=torch.int64)
        self.add_and_norm(rows, rows, rows[0])
        self.gate(rows)
        qkv = torch.zeros(0, self.query_size + 2 * self.key_size)
        cache = torch.zeros(1, 2, 1, self.key_size)
        self.rotate_and_store(qkv, rows[:0], rows[:0], no_rows, cache)
        self.attend(qkv, cache, self.prepare(no_rows.view(0, 1), no_rows))
        self.take_threads(all_of_them=False)

    def add_and_norm(self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._loops.add_and_norm(x.numpy(), added.numpy(), weight.numpy(), self._eps, out.numpy())
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        self._loops.rotate_and_store(qkv.numpy(), cos.numpy(), sin.numpy(), slots.numpy(), cache.numpy())

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._loops.gate(gate_up.numpy(), out.numpy())
        return out

    def prepare(self, tables: torch.Tensor, contexts: torch.Tensor) -> tuple[Array, Array]:
        return tables.numpy(), contexts.numpy()

    def attend(self, query: torch.Tensor, cache: torch.Tensor, prepared: tuple[Array, Array]) -> torch.Tensor:
        out = query.new_empty(query.shape[0], self.query_size)
        self._loops.attend(query.numpy(), cache.numpy(), *prepared, out.numpy())
        return out


class _Loops(NamedTuple):
    attend: Callable[..., None]
    add_and_norm: Callable[..., None]
    rotate_and_store: Callable[..., None]
    gate: Callable[..., None]


def _start_threads(threads: int) -> None:
    """Start Numba's threads and restore PyTorch's number of threads: both use one OpenMP library.

    Numba sets the number of PyTorch's threads to that of the cores, and lets parallel regions nest. PyTorch's
    attention calls matrix products in its parallel region; each product then started and ended threads of its
    own, and a prompt of 100 tokens took a second on two cores.
    """
    before = torch.get_num_threads()
    # Prefer OpenMP, which PyTorch has already loaded where there is one.
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    with suppress(AttributeError, OSError):  # no OpenMP, or its symbols are not visible globally
        ctypes.CDLL(None).omp_set_max_active_levels(1)
    torch.set_num_threads(before)


def compile_loops(heads: int, kv_heads: int, head_dim: int, block_size: int, *, parallel: bool) -> _Loops:
    """The loops for a model of this shape; each is compiled, or loaded, when it is first called.

    Numba's cache on disk distinguishes loops by their code and by the values that they close over, not by
    compile options. ``span`` is such a value, so a serial loop is never loaded in place of a parallel one.
    """
    span = numba.prange if parallel else range
    group, half = heads // kv_heads, head_dim // 2
    query_size, key_size = heads * head_dim, kv_heads * head_dim
    scale = np.float32(float(_LOG2_E) / head_dim**0.5)

    def attend(query: Array, cache: Array, tables: Array, contexts: Array, out: Array) -> None:
        # One block at a time, its keys and then its values, in memory order. When a block has a larger score
        # than the blocks before it, their results are scaled down (online softmax).
        for row in span(query.shape[0]):
            weights = np.empty((heads, block_size), np.float32)
            most = np.full(heads, _NO_SCORE, np.float32)
            total = np.zeros(heads, np.float32)
            result = np.zeros((heads, head_dim), np.float32)
            for start in range(0, contexts[row], block_size):
                block = tables[row, start // block_size]
                keys = min(block_size, contexts[row] - start)
                for key in range(keys):
                    for head in range(heads):
                        at = head // group * head_dim
                        score = np.float32(0.0)
                        for i in range(head_dim):
                            score += query[row, head * head_dim + i] * cache[block, 0, key, at + i]
                        weights[head, key] = score * scale
                for head in range(heads):
                    before = most[head]
                    for key in range(keys):
                        most[head] = max(most[head], weights[head, key])
                    shrunk = _exp2(before - most[head])
                    total[head] *= shrunk
                    for i in range(head_dim):
                        result[head, i] *= shrunk
                    for key in range(keys):
                        weights[head, key] = _exp2(weights[head, key] - most[head])
                        total[head] += weights[head, key]
                for key in range(keys):
                    for head in range(heads):
                        at = head // group * head_dim
                        for i in range(head_dim):
                            result[head, i] += weights[head, key] * cache[block, 1, key, at + i]
            for head in range(heads):
                for i in range(head_dim):
                    out[row, head * head_dim + i] = result[head, i] / total[head]

    def add_and_norm(x: Array, added: Array, weight: Array, eps: Any, out: Array) -> None:
        for row in span(x.shape[0]):
            squares = np.float32(0.0)
            for i in range(x.shape[1]):
                value = x[row, i] + added[row, i]
                x[row, i] = value
                squares += value * value
            factor = _ONE / np.sqrt(squares / np.float32(x.shape[1]) + eps)
            for i in range(x.shape[1]):
                out[row, i] = x[row, i] * factor * weight[i]

    def rotate_and_store(qkv: Array, cos: Array, sin: Array, slots: Array, cache: Array) -> None:
        for row in span(qkv.shape[0]):
            for first in range(0, query_size + key_size, head_dim):
                for i in range(half):
                    low, high = qkv[row, first + i], qkv[row, first + half + i]
                    qkv[row, first + i] = low * cos[row, i] + high * sin[row, i]
                    qkv[row, first + half + i] = high * cos[row, half + i] + low * sin[row, half + i]
            block, place = slots[row] // block_size, slots[row] % block_size
            for i in range(key_size):
                cache[block, 0, place, i] = qkv[row, query_size + i]
                cache[block, 1, place, i] = qkv[row, query_size + key_size + i]

    def gate(gate_up: Array, out: Array) -> None:
        for row in span(out.shape[0]):
            for i in range(out.shape[1]):
                value = gate_up[row, i]
                out[row, i] = value / (_ONE + _exp2(-value * _LOG2_E)) * gate_up[row, out.shape[1] + i]

    loops = (attend, add_and_norm, rotate_and_store, gate)
    return _Loops(*(_compile(loop, parallel=parallel) for loop in loops))


def _compile(loop: Callable[..., None], *, parallel: bool) -> Callable[..., None]:
    compiled: Callable[..., None]
    try:
        compiled = numba.njit(fastmath=_FAST, parallel=parallel, cache=True)(loop)
    except RuntimeError:  # no writable cache folder: every start compiles again
        compiled = numba.njit(fastmath=_FAST, parallel=parallel)(loop)
    return compiled


def _power_of_two(x: Any) -> Any:
    """2**x by its series, because there is no vector instruction for it. The comparisons keep a NaN."""
    x = _LEAST_POWER if x < _LEAST_POWER else x
    x = _MOST_POWER if x > _MOST_POWER else x
    whole = np.floor(x + _HALF)
    y = x - whole
    part = (((((_C6 * y + _C5) * y + _C4) * y + _C3) * y + _C2) * y + _C1) * y + _ONE
    return part * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


_exp2 = numba.njit(inline="always", fastmath=_FAST)(_power_of_two)
