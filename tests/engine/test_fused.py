"""CUDA's kernels compute what PyTorch's operators do, in every row and for every shape.

They run on a GPU, or with TRITON_INTERPRET=1 where Triton is installed.
"""

import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from engine.operators import Operators

can_run = find_spec("triton") is not None and (torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ)
pytestmark = pytest.mark.skipif(not can_run, reason="needs a CUDA device and Triton, or Triton's interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, ROWS, BLOCKS = 1e-5, 5, 60
# Heads, heads of keys, size of a head, tokens of a block: sizes that are no powers of two, and no sharing.
shapes = pytest.mark.parametrize(
    "shape", [(4, 2, 16, 16), (8, 8, 80, 8), (32, 8, 128, 16), (6, 2, 64, 48), (8, 2, 128, 256)], ids=str
)


def operators(shape: tuple[int, int, int, int]) -> tuple[Operators, Operators]:
    """CUDA's, and PyTorch's."""
    from engine.fused import FusedOperators

    *model, block_size = shape
    return FusedOperators(*model, EPS, block_size=block_size), Operators(*model, EPS)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE)


@pytest.mark.parametrize("width", [1, 100, 4096])
def test_on_cuda_norms_are_those_of_pytorch(width: int) -> None:
    fused, plain = operators((4, 2, 16, 16))
    x, added, weight = random(ROWS, width), random(ROWS, width), random(width)
    torch.testing.assert_close(fused.norm(x, weight), plain.norm(x, weight), atol=1e-5, rtol=1e-4)
    fused_x, plain_x = x.clone(), x.clone()
    expected = plain.add_and_norm(plain_x, added, weight)
    torch.testing.assert_close(fused.add_and_norm(fused_x, added, weight), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fused_x, plain_x)


@pytest.mark.parametrize("width", [1, 1024, 3000])
def test_on_cuda_a_gate_is_that_of_pytorch(width: int) -> None:
    fused, plain = operators((4, 2, 16, 16))
    gate_up = 10 * random(ROWS, 2 * width)
    torch.testing.assert_close(fused.gate(gate_up), plain.gate(gate_up), atol=1e-5, rtol=1e-4)


@shapes
def test_on_cuda_queries_and_keys_are_turned_and_stored_as_pytorch_does(
    shape: tuple[int, int, int, int],
) -> None:
    heads, kv_heads, size, block_size = shape
    cos, sin = random(ROWS, size), random(ROWS, size)
    slots = torch.tensor([0, block_size + 1, 3 * block_size - 1, 33, 40], device=DEVICE)
    qkv = random(ROWS, (heads + 2 * kv_heads) * size)
    caches = [torch.zeros(BLOCKS, 2, block_size, kv_heads * size, device=DEVICE) for _ in range(2)]
    turned = [qkv.clone(), qkv.clone()]
    for each, one, cache in zip(operators(shape), turned, caches, strict=True):
        each.rotate_and_store(one, cos, sin, slots, cache)
    torch.testing.assert_close(turned[0], turned[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(caches[0], caches[1], atol=1e-5, rtol=1e-4)


@shapes
def test_on_cuda_each_row_attends_to_its_own_keys(shape: tuple[int, int, int, int]) -> None:
    from engine.fused import FusedOperators

    heads, kv_heads, size, block_size = shape
    fused = FusedOperators(heads, kv_heads, size, EPS, block_size=block_size)
    contexts = torch.tensor([1, block_size, block_size + 1, 150, 7], device=DEVICE)
    free = iter((torch.randperm(BLOCKS - 1) + 1).tolist())
    tables = torch.zeros(ROWS, 150 // block_size + 2, dtype=torch.int64, device=DEVICE)
    cache = random(BLOCKS, 2, block_size, kv_heads * size)
    query = random(ROWS, (heads + 2 * kv_heads) * size)
    expected = []
    for row, context in enumerate(contexts.tolist()):
        blocks = [next(free) for _ in range(-(-context // block_size))]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        key, value = cache[blocks].transpose(0, 1).reshape(2, -1, kv_heads, size)[:, :context].transpose(1, 2)
        asked = query[row, : heads * size].view(heads, 1, size)
        expected.append(F.scaled_dot_product_attention(asked, key, value, enable_gqa=True).flatten())
    cache[0] = torch.nan  # the null block, which fills the tables
    attended = fused.attend(query, cache, fused.prepare(tables, contexts))
    torch.testing.assert_close(attended, torch.stack(expected), atol=1e-4, rtol=1e-4)
