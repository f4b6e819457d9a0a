"""Reads a LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

The caller has checked the settings and the numbers (``adapters.verify``). That the tensors fit this model and
its dtype is checked here: the model may have changed since.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.errors import (
    AdapterMismatch,
    AdapterNotFound,
    AdapterUnreadable,
    AdapterUnsupported,
    EngineAdapterError,
)
from engine.loader import one_line, read_json
from engine.lora import LoraWeights, no_room_without_memory
from engine.model import ModelConfig


def read_adapter(
    folder: Path, config: ModelConfig, *, max_rank: int, dtype: torch.dtype, device: torch.device
) -> LoraWeights:
    """The adapter's weights for a model of this shape. Raises an EngineAdapterError."""
    path = folder / "adapter_model.safetensors"
    try:
        if not folder.is_dir():
            raise AdapterNotFound(f"adapter folder {folder} does not exist")
        raw = read_json(folder / "adapter_config.json")
        rank, targets = raw["r"], frozenset(raw["target_modules"])
        if rank > max_rank:
            raise AdapterUnsupported(
                f"{folder}: r is {rank}; this engine runs 1 to {max_rank} (max_lora_rank)"
            )
        scale = raw["lora_alpha"] / (math.sqrt(rank) if raw.get("use_rslora") else rank)
        with no_room_without_memory(f"for {path}"), safe_open(str(path), framework="pt") as file:
            return _read_weights(path, file, config, rank, scale, targets, dtype, device)
    except EngineAdapterError:
        raise
    except Exception as error:  # whatever is wrong with the files, the engine's requests go on
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise AdapterUnreadable(f"adapter folder {folder} is not readable: {reason}") from error


def _read_weights(
    path: Path,
    file: Any,
    config: ModelConfig,
    rank: int,
    scale: float,
    targets: frozenset[str],
    dtype: torch.dtype,
    device: torch.device,
) -> LoraWeights:
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    # For each product of the model: the input size, and the output size of each part that it fuses.
    products = {
        "qkv": (
            hidden,
            {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads},
        ),
        "output": (heads, {"self_attn.o_proj": hidden}),
        "gate_up": (hidden, {"mlp.gate_proj": inner, "mlp.up_proj": inner}),
        "down": (inner, {"mlp.down_proj": hidden}),
    }
    left = set(file.keys())

    def take(name: str, *shape: int) -> torch.Tensor:
        if name not in left:
            raise AdapterMismatch(f"{path} lacks the tensor {name}")
        left.remove(name)
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            raise AdapterMismatch(f"{path}: {name} is {found}; rank and model say {shape}")
        tensor: torch.Tensor = file.get_tensor(name).float()
        return tensor

    def pair(layer: int, product: str) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, parts = products[product]
        prefix = f"base_model.model.model.layers.{layer}"
        wanted = [part for part in parts if part.partition(".")[2] in targets]
        a = torch.zeros(len(wanted) * rank, inputs)
        b = torch.zeros(len(wanted) * rank, sum(parts.values()))
        column = output = 0
        for part, outputs in parts.items():
            if part in wanted:
                columns = slice(column, column + rank)
                a[columns] = take(f"{prefix}.{part}.lora_A.weight", rank, inputs)
                b[columns, output : output + outputs] = (
                    take(f"{prefix}.{part}.lora_B.weight", outputs, rank).T * scale
                )
                column += rank
            output += outputs
        found = a.to(device, dtype).unsqueeze(0), b.to(device, dtype).unsqueeze(0)
        if not all(one.isfinite().all() for one in found):  # 0 times infinity would spoil others' rows
            raise AdapterUnsupported(
                f"{path}: layer {layer} has numbers that {dtype} cannot hold, scale included"
            )
        return found

    layers = tuple(
        {product: pair(layer, product) for product in products} for layer in range(config.num_layers)
    )
    if left:
        raise AdapterMismatch(f"{path} has {len(left)} tensors that the model has no place for: {min(left)}")
    return LoraWeights(layers)
