"""The benchmark for GPUs: its arithmetic and its logic hold on a machine without one."""

import json
import sys

import pytest
import torch

from benchmarks.engine_gpu import NO_CUDA, main, measure
from benchmarks.gpu_decode import LLAMA_8B, TINY, bandwidth, read_bytes
from tests import fork_server

CPU = torch.device("cpu")


def test_a_step_of_the_8b_shape_reads_15_gb_of_weights_and_128_kib_for_each_token_of_context() -> None:
    alone = read_bytes(LLAMA_8B, streams=0, context=512, item_bytes=2)
    assert alone == pytest.approx(15.0e9, rel=0.01)
    assert read_bytes(LLAMA_8B, streams=32, context=512, item_bytes=2) - alone == 32 * 512 * 128 * 1024


def test_bandwidth_counts_what_is_read_and_what_is_written() -> None:
    assert bandwidth(CPU, size=1 << 22) > 1e8


def test_both_engines_decode_the_same_streams_and_are_held_to_the_same_limit() -> None:
    rows = measure(TINY, [1, 3], prompt=20, tokens=6, block_size=16, device=CPU)
    assert [(row.engine, row.streams) for row in rows] == [
        ("sluice", 1),
        ("sluice", 3),
        ("transformers", 1),
        ("transformers", 3),
    ]
    for row in rows:
        assert row.tokens_per_s == pytest.approx(row.streams / row.tpot_p50_ms * 1e3)
        assert row.limit_share > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so nothing is refused")
def test_without_cuda_the_real_shape_is_refused_and_told_what_to_do() -> None:
    with pytest.raises(SystemExit, match="--tiny"):
        main(as_json=True)
    assert "CUDA" in NO_CUDA


def test_the_tiny_shape_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "benchmarks.engine_gpu", "--tiny", "--json", "--streams", "2"]
    done = fork_server.run([*command, "--prompt", "8", "--tokens", "4"], check=True)
    assert [row["streams"] for row in json.loads(done.stdout)["rows"]] == [2, 2]
