"""The size of the KV pool follows the arithmetic of the design, and the engine logs it at its start."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.build import pool_blocks
from engine.engine import Engine
from engine.errors import InvalidConfig
from engine.kv_pool import compute_kv_pool_size
from engine.loader import read_config
from engine.model import ModelConfig
from engine.values import GIB, EngineConfig


@pytest.fixture
def llama_8b(tiny_model: Path) -> ModelConfig:
    """The shape of Llama 3.1 8B."""
    return replace(
        read_config(tiny_model),
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        tie_embeddings=False,
    )


def test_llama_8b_in_fp16_on_24_gib_gets_3072_blocks_of_2_mib_at_128_kib_a_token(
    llama_8b: ModelConfig,
) -> None:
    size = compute_kv_pool_size(24 * GIB, llama_8b, weights_bytes=16 * GIB)  # the design's round figure
    assert size.num_blocks == 3072
    assert size.arithmetic == (
        "a token: 2 (key and value) x 32 layers x 8 KV heads x 128 x 2 bytes = 128 KiB",
        "a block: 16 tokens x 128 KiB = 2 MiB",
        "for blocks: 24 GiB x 1 - 16 GiB weights - 2 GiB activations = 6 GiB",
        "blocks: 6 GiB / 2 MiB = 3,072, room for 49,152 tokens",
    )


def test_the_weights_are_counted_from_the_shape(llama_8b: ModelConfig) -> None:
    assert llama_8b.num_parameters == 8_030_261_248
    exact = compute_kv_pool_size(24 * GIB, llama_8b, utilization=0.9)
    assert exact.num_blocks == (int(24 * GIB * 0.9) - 2 * 8_030_261_248 - 2 * GIB) // (2 * 1024**2)


def test_a_gpu_that_is_too_small_is_refused_with_the_arithmetic(llama_8b: ModelConfig) -> None:
    with pytest.raises(InvalidConfig, match=r"not even one KV block fits; .*16 GiB x 1 - 14\.96 GiB weights"):
        compute_kv_pool_size(16 * GIB, llama_8b)


def test_on_the_cpu_the_pool_is_the_configured_size_or_one_gib(llama_8b: ModelConfig) -> None:
    cpu = torch.device("cpu")
    assert pool_blocks(EngineConfig("", kv_cache_bytes=6 * GIB), llama_8b, cpu, 2) == 3072
    assert pool_blocks(EngineConfig(""), llama_8b, cpu, 2) == 512
    assert pool_blocks(EngineConfig("", num_blocks=7), llama_8b, cpu, 2) == 7


def test_the_engine_logs_the_arithmetic_line_by_line_at_its_start(
    make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="engine.build"):
        make_engine(num_blocks=None, kv_cache_bytes=1 << 20)
    lines = [one.getMessage() for one in caplog.records if one.getMessage().startswith("KV pool")]
    assert lines == [
        "KV pool, a token: 2 (key and value) x 2 layers x 2 KV heads x 16 x 4 bytes = 512 bytes",
        "KV pool, a block: 16 tokens x 512 bytes = 8 KiB",
        "KV pool, for blocks: 1 MiB x 1 - 0 bytes weights - 0 bytes activations = 1 MiB",
        "KV pool, blocks: 1 MiB / 8 KiB = 128, room for 2,048 tokens",
    ]
