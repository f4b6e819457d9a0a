"""A worker's own figures out of its ``/metrics``: vLLM's names, which Sluice has too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"
LORA = "vllm:lora_requests_info"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
_WANTED = (RUNNING, WAITING, KV_USAGE, CACHE_CONFIG, LORA, PROMPT_TOKENS, GENERATION_TOKENS)

_REST = re.compile(r"(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """What a worker told of itself. With several engines behind one server, all of them together.

    Args:
        running: sequences in the batch.
        waiting: sequences in the queue.
        kv_usage: share of KV blocks in use, 0 to 1.
        total_blocks: KV blocks; 0 when it does not tell.
        block_size: tokens of one; 0 when it does not tell.
        adapters: LoRA adapters that run or wait there.
        prompt_tokens, generation_tokens: since its start; ``None`` when it does not tell.
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
    """The figures; ``None`` when there are none of these names."""
    running = waiting = total_blocks = block_size = 0
    usages: list[float] = []
    tokens: dict[str, int] = {}
    adapters: frozenset[str] = frozenset()
    told_at = float("-inf")
    found = False
    for name, labels, value in _lines(text):
        number = _number(value)
        if number is None:
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
            told = dict(_LABEL.findall(labels))
            if name == CACHE_CONFIG:
                total_blocks += _count(told.get("num_gpu_blocks"))
                block_size = _count(told.get("block_size")) or block_size
            elif number >= told_at:
                # One series for each set of adapters that there ever was; its value is when.
                told_at = number
                listed = f"{told.get('running_lora_adapters', '')},{told.get('waiting_lora_adapters', '')}"
                adapters = frozenset(name.strip() for name in listed.split(",") if name.strip())
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


def _lines(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, labels and value of each wanted line; a search for each name skips the hundreds of others."""
    for name in _WANTED:
        at = 0 if text.startswith(name) else text.find("\n" + name) + 1
        while at or text.startswith(name, at):
            rest = _REST.match(text, at + len(name))
            if rest is not None:
                yield name, rest[1] or "", rest[2]
            at = text.find("\n" + name, at) + 1
            if not at:
                break


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < 1e15 else None  # neither NaN nor infinite


def _count(value: str | None) -> int:
    return int(value) if value is not None and value.isdecimal() and len(value) < 12 else 0
