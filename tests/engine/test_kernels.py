"""The compiled loops compute what PyTorch's operators do, in every row and for every number."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.kernels import CompiledOperators
from engine.operators import Operators
from tests.engine.support import greedy, random_prompts, reference_greedy, run_prompts

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 6, 2, 8, 1e-5
SHAPE = (HEADS, KV_HEADS, HEAD_DIM, EPS)
PLAIN = Operators(*SHAPE)
COMPILED = CompiledOperators(*SHAPE, block_size=BLOCK_SIZE, threads=1)
ON_TWO_THREADS = CompiledOperators(*SHAPE, block_size=BLOCK_SIZE, threads=2)
both = pytest.mark.parametrize("compiled", [COMPILED, ON_TWO_THREADS], ids=["one thread", "two threads"])
rows = st.integers(1, 40)


@both
@settings(max_examples=25, deadline=None)
@given(rows, st.integers(1, 70), st.floats(1e-3, 1e3))
def test_a_sum_and_its_norm_are_those_of_pytorch(
    compiled: Operators, count: int, width: int, scale: float
) -> None:
    x, added, weight = torch.randn(count, width) * scale, torch.randn(count, width), torch.randn(width)
    plain_x, compiled_x = x.clone(), x.clone()
    expected = PLAIN.add_and_norm(plain_x, added, weight)
    torch.testing.assert_close(compiled.add_and_norm(compiled_x, added, weight), expected)
    torch.testing.assert_close(compiled_x, plain_x)


@both
@settings(max_examples=25, deadline=None)
@given(rows, st.integers(1, 70), st.floats(1e-3, 100))
def test_a_gate_is_that_of_pytorch_from_tiny_to_large_numbers(
    compiled: Operators, count: int, width: int, scale: float
) -> None:
    gate_up = torch.randn(count, 2 * width) * scale
    torch.testing.assert_close(compiled.gate(gate_up), PLAIN.gate(gate_up))


@both
@settings(max_examples=25, deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_queries_and_keys_are_turned_and_stored_as_pytorch_does(
    compiled: Operators, count: int, random: object
) -> None:
    qkv = torch.randn(count, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    cos, sin = torch.randn(count, HEAD_DIM), torch.randn(count, HEAD_DIM)
    slots = torch.tensor(random.sample(range(4 * BLOCK_SIZE * 4), count))  # type: ignore[attr-defined]
    caches = [torch.zeros(16, 2, BLOCK_SIZE, KV_HEADS * HEAD_DIM) for _ in range(2)]
    turned = [qkv.clone(), qkv.clone()]
    for operators, one, cache in zip((PLAIN, compiled), turned, caches, strict=True):
        operators.rotate_and_store(one, cos, sin, slots, cache)
    torch.testing.assert_close(turned[1], turned[0])
    torch.testing.assert_close(caches[1], caches[0])


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_own_row(compiled: CompiledOperators, bad: float) -> None:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[1, 3] = bad
        return tensor

    def broken(result: torch.Tensor) -> list[bool]:
        return (~result.isfinite()).any(dim=1).tolist()

    weight = torch.ones(HEAD_DIM)
    x, added = torch.randn(3, HEAD_DIM), torch.randn(3, HEAD_DIM)
    compiled.add_and_norm(spoil(x), added, weight)
    assert broken(x) == [False, True, False]
    assert broken(compiled.gate(spoil(torch.randn(3, 16)))) == [False, True, False]
    cache = torch.randn(4, 2, BLOCK_SIZE, KV_HEADS * HEAD_DIM)
    cache[2, 1, 1, 5] = bad
    tables, contexts = torch.tensor([[1], [2], [3]]), torch.tensor([4, 4, 4])
    query = torch.randn(3, HEADS * HEAD_DIM)
    attended = compiled.attend(query, cache, compiled.prepare(tables, contexts))
    assert broken(attended) == [False, True, False]


def test_the_engine_gives_the_same_tokens_with_and_without_what_is_compiled(
    make_engine: Callable[..., Engine],
) -> None:
    prompts = random_prompts(24, 512)
    options: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 100}
    plain = run_prompts(make_engine(enforce_eager=True, **options), prompts, greedy(16))
    assert run_prompts(make_engine(**options), prompts, greedy(16)) == plain


def test_without_numba_the_engine_starts_says_so_and_answers(tiny_model: Path) -> None:
    script = (
        "import logging, sys; sys.modules['numba'] = None; logging.basicConfig()\n"
        "from engine.build import build_engine\n"
        "from engine.values import EngineConfig, GenerationRequest, SamplingParams\n"
        "engine = build_engine(EngineConfig(sys.argv[1], num_blocks=16, num_threads=1))\n"
        "engine.add(GenerationRequest('alone', (5, 6, 7), SamplingParams(8, temperature=0.0)))\n"
        "said = []\n"
        "while engine.has_work:\n"
        "    said += [token for output in engine.step() for token in output.token_ids]\n"
        "print([said])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_model)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == reference_greedy(tiny_model, [(5, 6, 7)], 8)
    assert "Numba is missing" in done.stderr
