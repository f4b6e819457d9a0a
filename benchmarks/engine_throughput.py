"""Tokens per second of the embedded engine, through client and process, against ``transformers`` (HF).

    python benchmarks/engine_throughput.py [--model models/demo] [--rounds 3] [--threads 1] [--json]

Both generate the same number of greedy tokens in float32 from the same random prompts, with as many
threads. The engine serves the requests as independent streams; transformers gets them as one batch of
equal lengths, its best case. Rounds alternate between the two, so that a change of the machine's load
meets both; these are medians. Measure on an idle machine: another busy process costs the single stream
most.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from engine.client import EngineClient
from engine.values import EngineConfig, EngineInfo, GenerationRequest, SamplingParams

CONCURRENCIES = (1, 8, 32, 64)
REPOSITORY = Path(__file__).resolve().parent.parent
Prompts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Row:
    """Medians at one concurrency; ``speedup`` is against the engine's own single stream."""

    concurrency: int
    engine_tokens_per_s: float
    speedup: float
    ttft_p50_ms: float
    tpot_p50_ms: float
    transformers_tokens_per_s: float
    ratio: float


async def run_engine(client: EngineClient, prompts: Prompts, new_tokens: int) -> tuple[float, list[float]]:
    """Seconds for all streams together, and the time to the first token of each."""
    first: list[float] = []
    sampling = SamplingParams(new_tokens, temperature=0.0, ignore_eos=True)
    started_at = time.perf_counter()

    async def stream(number: int, prompt: tuple[int, ...]) -> None:
        with client.submit(GenerationRequest(str(number), prompt, sampling)) as ticket:
            output = await ticket.receive()
            first.append(time.perf_counter() - started_at)
            while output.finish_reason is None:
                output = await ticket.receive()

    async with asyncio.TaskGroup() as streams:
        for number, prompt in enumerate(prompts):
            streams.create_task(stream(number, prompt))
    return time.perf_counter() - started_at, first


def run_transformers(model: Any, prompts: Prompts, new_tokens: int) -> float:
    """Seconds for one batch."""
    ids = torch.tensor(prompts)
    started_at = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    elapsed = time.perf_counter() - started_at
    if out.shape[1] != ids.shape[1] + new_tokens:
        raise RuntimeError(f"transformers gave {out.shape[1] - ids.shape[1]} tokens, not {new_tokens}")
    return elapsed


async def measure(options: argparse.Namespace) -> tuple[EngineInfo, list[Row]]:
    """Run all rounds at all concurrencies."""
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    client = EngineClient(EngineConfig(options.model, dtype="float32", num_threads=options.threads))
    info = await client.start()
    rng = random.Random(0)
    rows: list[Row] = []
    for concurrency in CONCURRENCIES:
        prompts = [
            tuple(rng.randrange(3, info.vocab_size) for _ in range(options.prompt_tokens))
            for _ in range(concurrency)
        ]
        await run_engine(client, prompts, 8)
        run_transformers(model, prompts, 8)
        elapsed, first, reference = [], [], []
        for _ in range(options.rounds):
            seconds, firsts = await run_engine(client, prompts, options.output_tokens)
            elapsed.append(seconds)
            first.append(statistics.median(firsts))
            reference.append(run_transformers(model, prompts, options.output_tokens))
        total = concurrency * options.output_tokens
        speed = total / statistics.median(elapsed)
        ttft = statistics.median(first)
        rows.append(
            Row(
                concurrency=concurrency,
                engine_tokens_per_s=speed,
                speedup=speed / rows[0].engine_tokens_per_s if rows else 1.0,
                ttft_p50_ms=ttft * 1e3,
                tpot_p50_ms=(statistics.median(elapsed) - ttft) / (options.output_tokens - 1) * 1e3,
                transformers_tokens_per_s=total / statistics.median(reference),
                ratio=speed * statistics.median(reference) / total,
            )
        )
    await client.stop()
    return info, rows


def print_table(info: EngineInfo, rows: list[Row], options: argparse.Namespace) -> None:
    """Print the medians as a table."""
    table = Table(
        title=f"{info.parameters / 1e6:.1f} M parameters, {info.dtype}, {options.threads} thread(s), "
        f"{options.prompt_tokens}+{options.output_tokens} tokens, {options.rounds} rounds"
    )
    for heading in (
        "streams",
        "engine tok/s",
        "x one stream",
        "TTFT p50 ms",
        "TPOT p50 ms",
        "HF tok/s",
        "engine / HF",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row.concurrency),
            f"{row.engine_tokens_per_s:,.0f}",
            f"{row.speedup:.1f}",
            f"{row.ttft_p50_ms:.1f}",
            f"{row.tpot_p50_ms:.2f}",
            f"{row.transformers_tokens_per_s:,.0f}",
            f"{row.ratio:.1f}",
        )
    Console().print(table)


def main() -> None:
    """Parses the options, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(REPOSITORY / "models" / "demo"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    info, rows = asyncio.run(measure(options))
    if options.json:
        print(
            json.dumps(
                {"engine": asdict(info), "options": vars(options), "rows": [asdict(row) for row in rows]}
            )
        )
    else:
        print_table(info, rows, options)


if __name__ == "__main__":
    main()
