"""Decode steps of fixed sizes in permanent buffers: the same tokens, whatever the buffers held before."""

from collections.abc import Callable

import pytest
import torch

from engine.engine import Engine
from engine.graphs import FixedDecode, decode_sizes
from engine.kernels import CompiledOperators
from tests.engine.support import greedy, random_prompts, run_prompts

BLOCKS = 24
PROMPTS = random_prompts(12, 512, longest=60)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here")


def through_fixed_sizes(engine: Engine, kernel: CompiledOperators) -> Engine:
    """Returns the engine after its decode steps were set to use the buffers, without CUDA graphs."""
    runner = engine._runner
    runner._fixed = FixedDecode(  # type: ignore[attr-defined]
        runner._model,  # type: ignore[attr-defined]
        kernel,
        runner._cache,  # type: ignore[attr-defined]
        max_num_seqs=12,
        max_blocks=runner._tables.shape[1],  # type: ignore[attr-defined]
        spare_block=BLOCKS + 1,
        record=False,
    )
    runner._model.attention.kernel = kernel  # type: ignore[attr-defined]
    return engine


def test_decode_steps_padded_to_a_fixed_size_give_the_tokens_of_unpadded_steps(
    make_engine: Callable[..., Engine],
) -> None:
    kernel = CompiledOperators(4, 2, 16, 1e-5, block_size=16, threads=1)
    options: dict[str, object] = {"num_blocks": BLOCKS, "max_num_seqs": 12, "max_model_len": 96}
    expected = run_prompts(make_engine(enforce_eager=True, **options), PROMPTS, greedy(20))
    engine = through_fixed_sizes(make_engine(**options), kernel)
    # In the second run prefixes are cached, and the buffers hold the data of the first run.
    for _ in range(2):
        with torch.inference_mode():
            assert run_prompts(engine, PROMPTS, greedy(20)) == expected
    assert engine.signals.preemptions > 0
    cache = engine._runner._cache  # type: ignore[attr-defined]
    assert all(bool((layer[0] == 0).all()) for layer in cache), "padding was written into the null block"


def test_the_decode_sizes_are_the_powers_of_two_and_the_largest_batch() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(48) == [1, 2, 4, 8, 16, 32, 48]
    assert decode_sizes(64) == [1, 2, 4, 8, 16, 32, 64]


@needs_cuda
@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"block_size": 256, "num_blocks": 40}, {"block_size": 8}]
)
def test_on_cuda_the_tokens_are_those_of_the_cpu(
    make_engine: Callable[..., Engine], options: dict[str, object]
) -> None:
    expected = run_prompts(make_engine(device="cpu"), PROMPTS, greedy(20))
    on_cuda = make_engine(device="cuda", dtype="float32", max_num_seqs=12, **options)
    assert run_prompts(on_cuda, PROMPTS, greedy(20)) == expected


@needs_cuda
@pytest.mark.parametrize("block_size", [16, 256])
def test_on_cuda_recorded_steps_mostly_agree_with_plain_ones_in_half_precision(
    make_engine: Callable[..., Engine], block_size: int
) -> None:
    options = {"dtype": "bfloat16", "device": "cuda", "max_num_seqs": 12, "block_size": block_size}
    plain = run_prompts(make_engine(enforce_eager=True, **options), PROMPTS, greedy(4))
    recorded = run_prompts(make_engine(**options), PROMPTS, greedy(4))
    assert sum(mine == theirs for mine, theirs in zip(recorded, plain, strict=True)) >= 9
