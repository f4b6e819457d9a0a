"""The parts of ``gpu_check`` that are not tests: each prints one line with its result.

``kernels`` and ``decode`` need PyTorch alone: packages that the engine imports for text and grammars, which
these parts do not use, are replaced by empty ones where they are missing.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "demo"
# The engine's imports that neither part uses, and the names that the engine imports from them.
UNUSED = {
    "tokenizers": ("Tokenizer",),
    "safetensors": ("SafetensorError", "safe_open"),
    "llguidance": ("LLMatcher", "LLParserLimits", "LLTokenizer", "grammar_from"),
}
PROMPT_TOKENS, ANSWER_TOKENS, BLOCK_SIZE = 512, 128, 16
# Prompts of lengths that no step had before, for the time to a first token.
NEW_LENGTHS = tuple(range(301, 301 + 11 * 16, 11))
# Share of the device's memory for weights and KV pool; the rest is for activations and graphs.
MEMORY_SHARE = 0.85


class _Missing(Exception):
    """Replaces a class that is not installed; its instances do nothing."""

    def __init__(self, *values: object, **named: object) -> None:
        super().__init__()

    @classmethod
    def from_file(cls, file: str) -> object:
        return cls()

    def to_str(self) -> str:
        return ""

    def decode(self, *values: object, **named: object) -> str:
        return ""


def replace_missing() -> list[str]:
    """Replace missing packages by empty ones, and return their names."""
    missing = [name for name in UNUSED if importlib.util.find_spec(name) is None]
    for name in missing:
        module: Any = types.ModuleType(name)
        for each in UNUSED[name]:
            setattr(module, each, type(each, (_Missing,), {}))
        sys.modules[name] = module
    return missing


def device_here() -> torch.device:
    """The GPU, or the CPU of a dry run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_engine(weights: Any, config: Any, *, streams: int, tokens: int, eager: bool) -> Any:
    """Build an engine with random weights."""
    from tokenizers import Tokenizer

    from engine.build import assemble
    from engine.values import EngineConfig

    settings = EngineConfig(
        "random",
        max_model_len=tokens,
        block_size=BLOCK_SIZE,
        max_num_seqs=streams,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        max_loras=0,
        seed=0,
        enforce_eager=eager,
    )
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    blocks = streams * -(-tokens // BLOCK_SIZE)
    return assemble(settings, config, weights, tokenizer, blocks, time.monotonic, time.monotonic())


def answers(engine: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """The greedy tokens of each prompt."""
    from engine.values import GenerationRequest, SamplingParams

    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        engine.add(GenerationRequest(str(number), tuple(prompt), sampling))
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)] += output.token_ids
    return found


def first_tokens_ms(engine: Any, prompts: list[list[int]]) -> float:
    """Milliseconds until all these prompts, asked at once, have their first token."""
    from engine.values import GenerationRequest, SamplingParams

    for number, prompt in enumerate(prompts):
        engine.add(GenerationRequest(f"new {number}", tuple(prompt), SamplingParams(1, temperature=0.0)))
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    return (time.perf_counter() - began) * 1e3


def random_prompts(vocabulary: int, lengths: list[int]) -> list[list[int]]:
    """Return random prompts of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def kernels(*, tiny: bool) -> str:
    """Compare greedy tokens of the same float32 weights: on the CPU, on the device, on it with graphs."""
    from dataclasses import replace

    from benchmarks.gpu_decode import TINY, random_weights

    device, cpu, tokens = device_here(), torch.device("cpu"), 8 if tiny else 48
    config = TINY if tiny else replace(TINY, num_layers=4, hidden_size=256, num_heads=8, head_dim=32)
    prompts = random_prompts(config.vocab_size, [1, 7, 16, 33] if tiny else [1, 7, 16, 33, 200, 411])
    found = []
    for place, eager in ((cpu, True), (device, True), (device, False)):
        weights = random_weights(config, torch.float32, place, seed=0)
        engine = make_engine(weights, config, streams=len(prompts), tokens=512, eager=eager)
        with torch.inference_mode():
            found.append(answers(engine, prompts, tokens))
    equal = sum(a == b == c for a, b, c in zip(*found, strict=True))
    if equal < len(prompts):
        raise SystemExit(f"{len(prompts) - equal} of {len(prompts)} answers differ: {found}")
    return f"{equal} of {len(prompts)} answers of {tokens} tokens equal (float32)"


def decode(streams: list[int], *, tiny: bool) -> str:
    """Time decode steps of the 8B shape in bfloat16, with and without graphs, against the memory limit."""
    from benchmarks.gpu_decode import (
        COPIED_BYTES,
        LLAMA_8B,
        TINY,
        bandwidth,
        decode_with_engine,
        random_weights,
        read_bytes,
    )

    device = device_here()
    config = TINY if tiny else LLAMA_8B
    prompt, tokens = (8, 6) if tiny else (PROMPT_TOKENS, ANSWER_TOKENS)
    dtype = torch.bfloat16
    speed = bandwidth(device, COPIED_BYTES if device.type == "cuda" else COPIED_BYTES >> 6)
    weights = random_weights(config, dtype, device)
    fitting = streams
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE
        fitting = [n for n in streams if n * (prompt + tokens) * config.kv_bytes_per_token(2) < free]
    prompts = random_prompts(config.vocab_size, [prompt] * max(fitting))
    found = []
    for eager in (False, True):
        engine = make_engine(weights, config, streams=max(fitting), tokens=prompt + tokens, eager=eager)
        for count in fitting:
            decode_with_engine(engine, prompts[:count], 4)
            step_s = statistics.median(decode_with_engine(engine, prompts[:count], tokens))
            limit_s = read_bytes(config, count, prompt + tokens // 2, dtype.itemsize) / speed
            found.append(
                f"{count} streams {'eager' if eager else 'graphs'}: {count / step_s:,.0f} tok/s, "
                f"TPOT {step_s * 1e3:.2f} ms, {limit_s / step_s:.0%} of the bandwidth limit"
            )
        if not tiny:
            alone = statistics.median(first_tokens_ms(engine, [prompts[0][:n]]) for n in NEW_LENGTHS[:5])
            together = first_tokens_ms(engine, random_prompts(config.vocab_size, list(NEW_LENGTHS[5:])))
            found.append(
                f"{'eager' if eager else 'graphs'}: prompts of new lengths have their first token after "
                f"{alone:.0f} ms alone, {len(NEW_LENGTHS[5:])} at once after {together:.0f} ms"
            )
        del engine
        if device.type == "cuda":
            torch.cuda.empty_cache()
    left_out = [str(n) for n in streams if n not in fitting]
    found += [f"{', '.join(left_out)} streams do not fit"] if left_out else []
    return f"{speed / 1e9:,.0f} GB/s copied; " + "; ".join(found)


def transformers(*, tiny: bool) -> str:
    """Compare greedy tokens of the engine and of Transformers on this device: the demo model in float32."""
    from transformers import AutoModelForCausalLM

    from engine.build import build_engine
    from engine.values import EngineConfig

    device, tokens = device_here(), 8 if tiny else 64
    config = EngineConfig(str(DEMO), dtype="float32", device=device.type, num_blocks=256, max_num_seqs=8)
    engine = build_engine(config)
    prompts = random_prompts(engine.info.vocab_size, [3, 40] if tiny else [1, 3, 16, 40, 100, 333])
    ours = answers(engine, prompts, tokens)
    theirs = []
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).to(device).eval()
    model.generation_config.eos_token_id = None  # all answers have the same length
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        with torch.inference_mode():
            given = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        theirs.append(given[0, len(prompt) :].tolist())
    return f"{_equal(ours, theirs)} of {len(prompts)} answers of {tokens} tokens equal (float32)"


def _equal(ours: list[list[int]], theirs: list[list[int]]) -> int:
    differing = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    if differing:
        raise SystemExit(f"{len(differing)} of {len(ours)} answers differ: {differing[:2]}")
    return len(ours)


def serve() -> str:
    """Send a chat request to ``sluice serve``, with vLLM where it is installed, and on all GPUs."""
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, gpus = f"http://127.0.0.1:{port}", torch.cuda.device_count()
    kind = "vllm" if gpus and importlib.util.find_spec("vllm") else "embedded"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sluice.yaml").write_text(
            f"server: {{port: {port}}}\nauth: {{enabled: false}}\n"
            f"engine: {{kind: {kind}, model: {DEMO}, enforce_eager: true}}\n"
        )
        options = ["--config", "sluice.yaml", *(["--gpus", "all"] if gpus else [])]
        command = [sys.executable, "-m", "ops.cli", "serve", *options]
        process = subprocess.Popen(command, cwd=folder, stdout=sys.stderr, start_new_session=True)
        try:
            while not _is_ready(url):
                if process.poll() is not None:
                    raise SystemExit(f"the gateway ended with status {process.returncode}")
                time.sleep(0.5)
            model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0).raise_for_status()
            tokens = answer.json()["usage"]["completion_tokens"]
            return f"{kind} on {gpus} GPUs: {answer.status_code}, {tokens} tokens"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def _is_ready(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/ready", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> None:
    """Run one part and print its line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("part", choices=["kernels", "decode", "transformers", "serve"])
    parser.add_argument("streams", type=int, nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "serve":
        print(serve())
        return
    missing = replace_missing()
    if options.part == "decode":
        line = decode(options.streams or [1], tiny=options.tiny)
    else:
        line = {"kernels": kernels, "transformers": transformers}[options.part](tiny=options.tiny)
    print(line + (f" (without {', '.join(missing)})" if missing else ""))


if __name__ == "__main__":
    main()
