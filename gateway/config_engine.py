"""The engine's section of the configuration, and the names that operators of vLLM know its keys by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from gateway.config_section import Section

# Names that operators of vLLM set in their containers (seed 000 §6), by our key.
ENGINE_ENV: Mapping[str, str] = MappingProxyType(
    {
        "TENSOR_PARALLEL_SIZE": "tensor_parallel_size",
        "GPU_MEMORY_UTILIZATION": "gpu_memory_utilization",
        "MAX_MODEL_LEN": "max_model_len",
        "MAX_NUM_SEQS": "max_num_seqs",
        "MAX_NUM_BATCHED_TOKENS": "max_num_batched_tokens",
        "BLOCK_SIZE": "block_size",
        "ENABLE_PREFIX_CACHING": "enable_prefix_caching",
        "QUANTIZATION": "quantization",
        "ENFORCE_EAGER": "enforce_eager",
    }
)


class EngineSection(Section):
    """The engine in process.

    Defaults are seed 000 §6's; ``max_num_batched_tokens`` is left to the engine's kind when unset,
    since a CPU wants shorter steps than the 8,192 of an A10G.
    """

    kind: Literal["embedded", "vllm", "none"] = "embedded"
    model: str = "models/demo"
    tokenizer: str | None = None
    served_model_name: str | None = None
    max_model_len: Annotated[int, Field(ge=64, le=1_048_576)] = 4096
    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 128
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kv_cache_bytes: Annotated[int, Field(ge=1 << 16)] | None = None
    num_blocks: Annotated[int, Field(ge=1)] | None = None
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    enable_prefix_caching: bool = True
    share_prefix_across_tenants: bool = False
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_loras: Annotated[int, Field(ge=0, le=1024)] = 8
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] = 64
    seed: int | None = None
    start_timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 600.0

    @property
    def model_id(self) -> str:
        """The base model's public id: ``served_model_name``, else the folder's name."""
        return self.served_model_name or Path(self.model).resolve().name

    @property
    def tokenizer_folder(self) -> Path:
        """Where ``tokenizer.json`` lies: ``tokenizer``, else the model's folder."""
        return Path(self.tokenizer or self.model)
