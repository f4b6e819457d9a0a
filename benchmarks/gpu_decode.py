"""A decoder of the shape of Llama 3.1 8B with random weights, and the time of its decode steps."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.engine import Engine
from engine.model import LayerWeights, ModelConfig, ModelWeights
from engine.operators import Linear
from engine.values import GenerationRequest, SamplingParams

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    qkv_bias=False,
    head_norm=False,
    tie_embeddings=False,
    dtype="bfloat16",
    eos_token_ids=(),
)


TINY = replace(
    LLAMA_8B,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=1024,
)


COPIED_BYTES = 1 << 30


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, seed: int | None = None
) -> ModelWeights:
    """Return weights of the scale that a trained model has, so that activations stay finite.

    With a ``seed`` they are drawn on the CPU, so that they are the same on every device.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        if generator is not None:
            return torch.empty(shape).normal_(0.0, 0.02, generator=generator).to(device, dtype)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02)

    def ones() -> torch.Tensor:
        return torch.ones(config.hidden_size, dtype=dtype, device=device)

    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=ones(),
            qkv=Linear(weight(heads + 2 * kv_heads, hidden)),
            output=Linear(weight(hidden, heads)),
            post_norm=ones(),
            gate_up=Linear(weight(2 * inner, hidden)),
            down=Linear(weight(hidden, inner)),
        )
        for _ in range(config.num_layers)
    )
    embedding = weight(config.vocab_size, hidden)
    return ModelWeights(embedding, layers, ones(), Linear(weight(config.vocab_size, hidden)))


def read_bytes(config: ModelConfig, streams: int, context: int, item_bytes: int) -> int:
    """Return the bytes a decode step must read: weights but the embedding, keys and values of each stream."""
    weights = (config.num_parameters - config.vocab_size * config.hidden_size) * item_bytes
    return weights + streams * context * config.kv_bytes_per_token(item_bytes)


def bandwidth(device: torch.device, size: int = COPIED_BYTES) -> float:
    """Bytes a second that a copy reads and writes on this device; the best of ten."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / min(timed(lambda: target.copy_(source), device) for _ in range(10))


def decode_with_engine(engine: Engine, prompts: list[list[int]], tokens: int) -> list[float]:
    """Return the seconds of each step in which all streams decode and nothing else runs."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        engine.add(GenerationRequest(str(number), tuple(prompt), sampling))
    times: list[float] = []
    started: set[str] = set()
    while engine.has_work:
        decoding = len(started) == len(prompts)
        asked_at = time.perf_counter()  # a step ends with its tokens on the host, so the device is done
        outputs = engine.step()
        if decoding and len(outputs) == len(prompts):
            times.append(time.perf_counter() - asked_at)
        started.update(output.request_id for output in outputs)
    return times


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of ``work``, including what it has queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started_at = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_at
