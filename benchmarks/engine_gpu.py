"""The embedded engine and Transformers on a GPU: a model of the shape of Llama 3.1 8B with random weights.

    python -m benchmarks.engine_gpu              (CUDA, bfloat16, 32 and 128 streams)
    python -m benchmarks.engine_gpu --tiny       (a tiny shape, on any device: does the script work?)

All streams start together with prompts of one length and answer greedily until each has its tokens. Only
decoding is timed: from the moment when all streams have their first token until the first stream ends. A step
has to read all weights but the embedding's, and the keys and values of all streams. The limit is the time
that this takes at the bandwidth that a copy reaches on this GPU. Transformers decodes the same batch with
``generate``; the time of a run of one token, the prefill, is subtracted.
"""

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.gpu_decode import (
    COPIED_BYTES,
    LLAMA_8B,
    TINY,
    bandwidth,
    decode_with_engine,
    random_weights,
    read_bytes,
    timed,
)
from engine.build import assemble
from engine.model import ModelConfig
from engine.values import EngineConfig

TOKENIZER = Path(__file__).resolve().parent.parent / "models" / "demo" / "tokenizer.json"
NO_CUDA = "this benchmark needs a CUDA device and there is none; --tiny runs its logic on the CPU"


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one engine at one number of streams."""

    engine: str
    streams: int
    tokens_per_s: float
    tpot_p50_ms: float
    limit_share: float


def decode_with_transformers(
    config: ModelConfig, prompts: list[list[int]], tokens: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Mean seconds of a decode step of the whole batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=config.vocab_size,
                    hidden_size=config.hidden_size,
                    intermediate_size=config.intermediate_size,
                    num_hidden_layers=config.num_layers,
                    num_attention_heads=config.num_heads,
                    num_key_value_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=config.max_position,
                    tie_word_embeddings=False,
                )
            ).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.tensor(prompts, device=device)

    def generate(count: int) -> None:
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )

    with torch.inference_mode():
        generate(2)
        first = timed(lambda: generate(1), device)
        return max(timed(lambda: generate(tokens), device) - first, 1e-9) / (tokens - 1)


def measure(
    config: ModelConfig, streams: list[int], prompt: int, tokens: int, block_size: int, device: torch.device
) -> list[Row]:
    """Measure both engines at each number of streams, one after the other so that each has all the memory."""
    dtype = torch.bfloat16
    speed = bandwidth(device, COPIED_BYTES if device.type == "cuda" else COPIED_BYTES >> 6)
    most = max(streams)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, config.vocab_size, (most, prompt), generator=generator).tolist()
    rows: list[Row] = []

    def add(name: str, count: int, step_s: float) -> None:
        least_s = read_bytes(config, count, prompt + tokens // 2, dtype.itemsize) / speed
        rows.append(Row(name, count, count / step_s, step_s * 1e3, least_s / step_s))

    settings = EngineConfig(
        "random",
        max_model_len=prompt + tokens,
        block_size=block_size,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        max_loras=0,
        seed=0,
    )
    num_blocks = most * -(-(prompt + tokens) // block_size)
    weights = random_weights(config, dtype, device)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    now = time.monotonic
    engine = assemble(settings, config, weights, tokenizer, num_blocks, now, now())
    for count in streams:
        decode_with_engine(engine, prompts[:count], 4)
        add("sluice", count, statistics.median(decode_with_engine(engine, prompts[:count], tokens)))
    del engine, weights
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for count in streams:
        add("transformers", count, decode_with_transformers(config, prompts[:count], tokens, dtype, device))
    return rows


def main(
    tiny: Annotated[bool, typer.Option(help="A tiny shape on any device; its figures mean nothing.")] = False,
    streams: Annotated[str, typer.Option(help="Streams at once, with commas.")] = "32,128",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens of each answer.")] = 128,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decodes with both and prints tokens per second, TPOT and the share of the memory-bandwidth limit."""
    if not tiny and not torch.cuda.is_available():
        raise SystemExit(NO_CUDA)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = [int(one) for one in streams.split(",")]
    config = TINY if tiny else LLAMA_8B
    torch.set_num_threads(1)
    rows = measure(config, counts, prompt, tokens, block_size, device)
    if as_json:
        print(json.dumps({"device": str(device), "tiny": tiny, "rows": [asdict(row) for row in rows]}))
        return
    table = Table(title=f"{'tiny' if tiny else '8B'} shape, bfloat16, {device}, {prompt} in, {tokens} out")
    for heading in ("engine", "streams", "tok/s", "TPOT p50 ms", "of the bandwidth limit"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.engine,
            str(row.streams),
            f"{row.tokens_per_s:,.0f}",
            f"{row.tpot_p50_ms:.2f}",
            f"{row.limit_share:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
