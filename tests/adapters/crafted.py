"""Adapters made byte by byte, so that each can be wrong in one way."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from adapters.base_model import BaseModel, base_model
from adapters.catalogue import AdapterState, Alias
from adapters.registry import AdapterRegistry
from adapters.selection import AdapterOffer
from adapters.values import Adapter

CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
SHAPES = {"q_proj": (8, 8), "v_proj": (8, 4)}
RANK = 2


def registry_of(adapters: Iterable[Adapter], aliases: Mapping[str, str] | None = None) -> AdapterRegistry:
    """A registry with these adapters, all active."""
    given = {adapter.adapter_id: adapter for adapter in adapters}
    named = {name: Alias(name, target) for name, target in (aliases or {}).items()}
    registry = AdapterRegistry()
    registry.offer(AdapterOffer(given, dict.fromkeys(given, AdapterState.ACTIVE), named))
    return registry


def base(**changes: Any) -> BaseModel:
    """A tiny base model."""
    return base_model("tiny", {**CONFIG, **changes}, max_lora_rank=16)


def tensor_name(layer: int, module: str, side: str) -> str:
    return f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{side}.weight"


def tensors(rank: int = RANK) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of each tensor, by name, for two layers and two modules."""
    made: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for layer in range(2):
        for module, (inputs, outputs) in SHAPES.items():
            made[tensor_name(layer, module, "A")] = ("F32", (rank, inputs), floats(rank * inputs))
            made[tensor_name(layer, module, "B")] = ("F32", (outputs, rank), floats(outputs * rank))
    return made


def floats(count: int, value: float = 0.25) -> bytes:
    return struct.pack(f"<{count}f", *[value] * count)


def safetensors(entries: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """The bytes of a safetensors file with these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in entries.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    return with_header(header, b"".join(data for _, _, data in entries.values()))


def with_header(header: object, body: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + body


def adapter_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def write(
    folder: Path,
    *,
    config: object = None,
    weights: bytes | None = None,
) -> Path:
    """Writes a valid adapter, except for the parts given; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(adapter_config() if config is None else config)
    (folder / "adapter_config.json").write_text(text)
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors()) if weights is None else weights)
    return folder
