"""Reads a worker's load from its ``/metrics``, by vLLM's metric names, which Sluice uses too."""

from __future__ import annotations

from dataclasses import dataclass, field

from observability.metrics_text import samples_of

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"
LORA = "vllm:lora_requests_info"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
_WANTED = (RUNNING, WAITING, KV_USAGE, CACHE_CONFIG, LORA, PROMPT_TOKENS, GENERATION_TOKENS)

# Larger values, infinity and NaN are ignored.
_MAX_VALUE = 1e15


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """What a worker reports; the sum over all engines of one server.

    Args:
        kv_usage: share of KV blocks in use, 0 to 1.
        total_blocks: KV blocks; 0 when not reported.
        block_size: tokens of one; 0 when not reported.
        adapters: LoRA adapters with running or waiting requests.
        prompt_tokens, generation_tokens: since its start; ``None`` when not reported.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    total_blocks: int = 0
    block_size: int = 0
    adapters: frozenset[str] = field(default_factory=frozenset)
    prompt_tokens: int | None = None
    generation_tokens: int | None = None


def read_figures(text: str) -> WorkerFigures | None:
    """The figures; ``None`` when the page has none of these names."""
    running = waiting = total_blocks = block_size = 0
    usages: list[float] = []
    tokens: dict[str, int] = {}
    adapters: frozenset[str] = frozenset()
    newest_at = float("-inf")
    found = False
    for sample in samples_of(text, *_WANTED):
        name, number = sample.name, sample.value
        if not abs(number) < _MAX_VALUE:
            continue
        if name == RUNNING:
            running, found = running + int(number), True
        elif name == WAITING:
            waiting, found = waiting + int(number), True
        elif name == KV_USAGE:
            usages.append(min(max(number, 0.0), 1.0))
        elif name in (PROMPT_TOKENS, GENERATION_TOKENS):
            tokens[name] = tokens.get(name, 0) + int(number)
        else:
            labels = sample.labels
            if name == CACHE_CONFIG:
                total_blocks += _count(labels.get("num_gpu_blocks"))
                block_size = _count(labels.get("block_size")) or block_size
            elif number >= newest_at:
                # One series for each set of adapters since the start; its value is the time.
                newest_at = number
                both = (labels.get(f"{state}_lora_adapters", "") for state in ("running", "waiting"))
                adapters = frozenset(name.strip() for name in ",".join(both).split(",") if name.strip())
    if not found:
        return None
    kv_usage = sum(usages) / len(usages) if usages else 0.0
    return WorkerFigures(
        running,
        waiting,
        kv_usage,
        total_blocks,
        block_size,
        adapters,
        tokens.get(PROMPT_TOKENS),
        tokens.get(GENERATION_TOKENS),
    )


def _count(value: str | None) -> int:
    return int(value) if value is not None and value.isdecimal() and len(value) < 12 else 0
