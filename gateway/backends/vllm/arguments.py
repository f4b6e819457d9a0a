"""vLLM's arguments from the engine's section of the configuration; does not import vLLM."""

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from engine.errors import InvalidConfig
from gateway.config.engine import EngineSection

# Default bound on a step's tokens: one or two prompts of 3,500 tokens must not displace fifty short ones.
MAX_NUM_BATCHED_TOKENS = 8192
CPU_BLOCK_MULTIPLE = 32  # the block size of vLLM's attention on the CPU must be a multiple of this
# KV pool on a CPU if none is configured, at most this share of free memory: vLLM takes 92 % of all memory.
CPU_KV_BYTES = 4 << 30
CPU_KV_SHARE = 0.25
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the ranks for which vLLM has kernels

_SAME_NAME = (
    *("model", "tokenizer", "max_model_len", "block_size", "max_num_seqs", "dtype", "enable_prefix_caching"),
    *("gpu_memory_utilization", "quantization", "enforce_eager"),
    *("tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend"),
)
# Keys of the section that are passed on, by vLLM's name of the argument.
_PASSED: Mapping[str, str] = {
    **{name: name for name in _SAME_NAME},
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "num_gpu_blocks_override": "num_blocks",
}
# All arguments that the gateway sets from a key of the section: the operator sets the key instead.
OWN_KEYS: Mapping[str, str] = {
    **_PASSED,
    **{name: name for name in ("served_model_name", "max_num_batched_tokens", "max_loras", "max_cpu_loras")},
    **{name: name for name in ("max_lora_rank", "seed", "reasoning_parser")},
    "enable_lora": "max_loras",
    "runner": "task",
}
FIXED = {
    "scheduling_policy": "requests have priorities",
    "disable_log_stats": "admission needs the engine's figures",
    "enable_log_requests": "requests are logged by the gateway, without their text",
    "logging_config": "vLLM logs through the gateway",
    "log_config_file": "vLLM logs through the gateway",
    "skip_tokenizer_init": "answers are text",
}


def lora_places(section: EngineSection, *, adapters_registered: bool) -> int:
    """Adapters in one batch; 0 unless they are configured or registered: vLLM reserves memory for them."""
    return section.max_loras if adapters_registered or "max_loras" in section.model_fields_set else 0


def engine_arguments(
    section: EngineSection, *, max_loras: int, new_seed: Callable[[], int]
) -> dict[str, Any]:
    """vLLM's ``AsyncEngineArgs`` by name, for a GPU; :func:`on_cpu` adapts them for a CPU."""
    arguments: dict[str, Any] = {
        **{name: getattr(section, key) for name, key in _PASSED.items()},
        "max_num_batched_tokens": section.max_num_batched_tokens
        or max(MAX_NUM_BATCHED_TOKENS, section.max_num_seqs),
        "seed": section.seed if section.seed is not None else new_seed(),
        "served_model_name": section.model_id,
        "scheduling_policy": "priority",
        "disable_log_stats": False,
        "enable_log_requests": False,
        **section.extra_args,
    }
    if section.task == "embed":
        arguments["runner"] = "pooling"
        # vLLM knows each embedding model's own length, and that an encoder such as BERT has no prefixes.
        for name in {"max_model_len", "enable_prefix_caching"} - section.model_fields_set:
            del arguments[name]
    if max_loras:
        rank = next(rank for rank in LORA_RANKS if rank >= section.max_lora_rank)
        arguments |= {
            "enable_lora": True,
            "max_loras": max_loras,
            "max_cpu_loras": section.max_cpu_loras or max_loras,
            "max_lora_rank": rank,
        }
    return {name: value for name, value in arguments.items() if value is not None}


def on_cpu(arguments: Mapping[str, Any], *, free_bytes: int, kv_configured: bool) -> dict[str, Any]:
    """The arguments for vLLM's CPU build.

    ``kv_configured``: whether the environment sets the pool's size (``VLLM_CPU_KVCACHE_SPACE``).
    """
    changed = dict(arguments)
    changed["block_size"] = -(-arguments["block_size"] // CPU_BLOCK_MULTIPLE) * CPU_BLOCK_MULTIPLE
    if arguments["dtype"] == "auto":
        changed["dtype"] = "float32"
    if arguments.get("max_model_len", math.inf) <= arguments["max_num_batched_tokens"]:
        # A prompt in parts ends vLLM 0.32 on a CPU if its request has a seed.
        changed.setdefault("enable_chunked_prefill", False)
    if "max_loras" in arguments:
        # vLLM 0.32 reads a sequence without an adapter as one with that of the last place. Two more places
        # than adapters keep it empty: a new version is loaded before the old one is removed.
        changed["max_loras"] = changed["max_cpu_loras"] = arguments["max_cpu_loras"] + 2
    if "kv_cache_memory_bytes" not in arguments and not kv_configured:
        changed["kv_cache_memory_bytes"] = min(CPU_KV_BYTES, int(free_bytes * CPU_KV_SHARE))
    return changed


def check_extra(extra: Collection[str], known: Collection[str]) -> None:
    """Refuse ``extra_args`` that vLLM does not have or that the gateway sets. Raises InvalidConfig."""
    for name in extra:
        where = f"engine.extra_args.{name}"
        if name in OWN_KEYS:
            raise InvalidConfig(f"{where}: set engine.{OWN_KEYS[name]} instead")
        if name in FIXED:
            raise InvalidConfig(f"{where}: cannot be changed: {FIXED[name]}")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "see vLLM's engine arguments"
            raise InvalidConfig(f"{where}: vLLM has no such argument; {hint}")
