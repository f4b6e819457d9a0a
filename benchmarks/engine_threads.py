"""How much faster more threads make each kind of step of the embedded engine, and how many it chooses.

    python -m benchmarks.engine_threads

The models have random weights and run in this process: one of the demo model's shape and one sixty times as
large. A step is a prompt alone, or one token for each of a few streams with few keys. The same steps run on
one thread and on all, in turn, whatever the engine would choose; the last column has its choice. Shown are
medians. On shared cores, all threads wait for the slowest. Needs 3 GiB of memory.
"""

import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import engine.threads
from benchmarks.engine_gpu import TOKENIZER
from benchmarks.gpu_decode import LLAMA_8B, decode_with_engine, random_weights
from engine.build import assemble
from engine.engine import Engine
from engine.model import ModelConfig
from engine.operators import Operators
from engine.threads import StepThreads
from engine.values import EngineConfig, GenerationRequest, SamplingParams

SMALL = replace(
    LLAMA_8B,
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    tie_embeddings=True,
    max_position=4096,
)
LARGE = replace(SMALL, hidden_size=1024, intermediate_size=2816, num_layers=24, num_heads=16, num_kv_heads=8)
KEYS, DECODE_STEPS = 16, 6


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of step: milliseconds on one thread and on all, and how many threads the engine chooses."""

    step: str
    one_ms: float
    all_ms: float
    chosen: int


def make_engine(config: ModelConfig) -> Engine:
    """Build an engine with random weights, on as many threads as PyTorch has now."""
    settings = EngineConfig(
        "random",
        max_model_len=2048,
        block_size=32,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        max_loras=0,
        seed=0,
    )
    weights = random_weights(config, torch.float32, torch.device("cpu"), seed=0)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    return assemble(settings, config, weights, tokenizer, 1024, time.monotonic, time.monotonic())


def time_prompt(model: Engine, tokens: int) -> float:
    """Return the milliseconds of the step that prefills a new prompt."""
    prompt = tuple(random.randrange(3, 4096) for _ in range(tokens))
    model.add(GenerationRequest("prompt", prompt, SamplingParams(1, temperature=0.0, ignore_eos=True)))
    started_at = time.perf_counter()
    model.step()
    return (time.perf_counter() - started_at) * 1e3


def time_decode(model: Engine, streams: int) -> float:
    """Milliseconds of a step that gives each stream a token."""
    prompts = [[random.randrange(3, 4096) for _ in range(KEYS)] for _ in range(streams)]
    return statistics.median(decode_with_engine(model, prompts, DECODE_STEPS)) * 1e3


def measure(
    name: str, config: ModelConfig, sizes: list[int], streams: list[int], threads: int, rounds: int
) -> list[Row]:
    """Measure each kind of step of a model, on one thread and on all in turn."""
    torch.set_num_threads(threads)
    model, chooser = make_engine(config), StepThreads(threads, config, Operators(1, 1, 1, 0.0))
    bound = engine.threads.LEAST_WORK
    prompts = [(f"prompt {n}", time_prompt, n, n * n) for n in sizes]
    decodes = [(f"{n} streams", time_decode, n, n * KEYS) for n in streams]
    rows = []
    for step, run, size, pairs in prompts + decodes:
        alone: list[float] = []
        everyone: list[float] = []
        for number in range(-1, rounds):  # the first round warms up and is not counted
            for least_work, times in ((sys.maxsize, alone), (0, everyone)):
                engine.threads.LEAST_WORK = least_work
                spent_ms = run(model, size)
                if number >= 0:
                    times.append(spent_ms)
        engine.threads.LEAST_WORK = bound
        chosen = chooser.take(size, pairs)
        rows.append(Row(f"{name}, {step}", statistics.median(alone), statistics.median(everyone), chosen))
    return rows


def main(
    threads: Annotated[int, typer.Option(min=2, help="All the threads.")] = max(2, os.cpu_count() or 1),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each step runs on one and on all.")] = 5,
) -> None:
    """Prints milliseconds of each step on one thread and on all, and what the engine chooses."""
    table = Table(title=f"{threads} threads, {os.cpu_count()} cores, medians of {rounds} rounds")
    for heading in ("model and step", "ms on 1", f"ms on {threads}", "times as fast", "chosen"):
        table.add_column(heading, justify="right")
    rows = measure("4.7 M", SMALL, [16, 32, 64, 256, 1024], [1, 8, 32, 64], threads, rounds)
    rows += measure("290 M", LARGE, [16, 64, 256], [1, 8, 32], threads, rounds)
    for row in rows:
        faster = f"{row.one_ms / row.all_ms:.2f}"
        table.add_row(row.step, f"{row.one_ms:.1f}", f"{row.all_ms:.1f}", faster, str(row.chosen))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
