"""From the engine's section of the configuration to vLLM's arguments, without vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from engine.errors import InvalidConfig
from gateway.config.engine import EngineSection

# A cap on a step's tokens: one or two prompts of 3,500 tokens must not crowd out fifty short ones.
MAX_NUM_BATCHED_TOKENS = 8192
# vLLM's attention on the CPU takes whole vectors of keys.
CPU_BLOCK_MULTIPLE = 32
# The pool on a CPU when nothing says how large: vLLM would take 92 % of the machine's memory.
CPU_KV_BYTES = 4 << 30
CPU_KV_SHARE = 0.25
# The ranks for which vLLM has kernels.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

# Arguments of vLLM that a key of the configuration stands for, or that the gateway must decide itself.
OWN_KEYS: Mapping[str, str] = {
    "model": "model",
    "tokenizer": "tokenizer",
    "served_model_name": "served_model_name",
    "max_model_len": "max_model_len",
    "block_size": "block_size",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "dtype": "dtype",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "num_gpu_blocks_override": "num_blocks",
    "enable_prefix_caching": "enable_prefix_caching",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "quantization": "quantization",
    "enforce_eager": "enforce_eager",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "distributed_executor_backend": "distributed_executor_backend",
    "enable_lora": "max_loras",
    "max_loras": "max_loras",
    "max_cpu_loras": "max_cpu_loras",
    "max_lora_rank": "max_lora_rank",
    "seed": "seed",
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
    """Adapters in one batch; none without a sign that adapters will come, since vLLM reserves their room."""
    return section.max_loras if adapters_registered or "max_loras" in section.model_fields_set else 0


def engine_arguments(
    section: EngineSection, *, max_loras: int, new_seed: Callable[[], int]
) -> dict[str, Any]:
    """vLLM's ``AsyncEngineArgs`` by name, as for a GPU; :func:`on_cpu` makes those for a CPU of them."""
    arguments: dict[str, Any] = {
        "model": section.model,
        "tokenizer": section.tokenizer,
        "max_model_len": section.max_model_len,
        "block_size": section.block_size,
        "max_num_seqs": section.max_num_seqs,
        "max_num_batched_tokens": section.max_num_batched_tokens
        or max(MAX_NUM_BATCHED_TOKENS, section.max_num_seqs),
        "dtype": section.dtype,
        "enable_prefix_caching": section.enable_prefix_caching,
        "gpu_memory_utilization": section.gpu_memory_utilization,
        "quantization": section.quantization,
        "enforce_eager": section.enforce_eager,
        "tensor_parallel_size": section.tensor_parallel_size,
        "pipeline_parallel_size": section.pipeline_parallel_size,
        "distributed_executor_backend": section.distributed_executor_backend,
        "kv_cache_memory_bytes": section.kv_cache_bytes,
        "num_gpu_blocks_override": section.num_blocks,
        "seed": section.seed if section.seed is not None else new_seed(),
        "scheduling_policy": "priority",
        "disable_log_stats": False,
        "enable_log_requests": False,
        **section.extra_args,
    }
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
    """The same for vLLM's CPU build.

    Args:
        arguments: of :func:`engine_arguments`.
        free_bytes: the machine's free memory.
        kv_configured: whether the environment names the pool's size (``VLLM_CPU_KVCACHE_SPACE``).
    """
    changed = dict(arguments)
    changed["block_size"] = -(-arguments["block_size"] // CPU_BLOCK_MULTIPLE) * CPU_BLOCK_MULTIPLE
    if arguments["dtype"] == "auto":
        changed["dtype"] = "float32"
    if "kv_cache_memory_bytes" not in arguments and not kv_configured:
        changed["kv_cache_memory_bytes"] = min(CPU_KV_BYTES, int(free_bytes * CPU_KV_SHARE))
    return changed


def check_extra(extra: Collection[str], known: Collection[str]) -> None:
    """Refuse further arguments that vLLM does not have or that are not the operator's to set.

    Raises:
        InvalidConfig: names the argument, and what to do.
    """
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
