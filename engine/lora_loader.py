"""Reads a LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

The adapter is checked against the model; every defect raises an ``EngineAdapterError`` whose message names
the file or tensor.
"""

import math
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import (
    AdapterMismatch,
    AdapterNotFound,
    AdapterUnreadable,
    AdapterUnsupported,
    ModelNotFound,
    ModelTruncated,
)
from engine.loader import one_line, read_json
from engine.lora import LoraWeights, no_room_without_memory
from engine.model import ModelConfig

# Keys of adapter_config.json that have no effect on inference. Any other key that is set, and is not read
# below, changes the adapter's computation and is refused.
_INFORMATIVE = frozenset((
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type",
    "lora_dropout", "init_lora_weights", "corda_config", "eva_config", "loftq_config", "lora_ga_config",
    "ensure_weight_tying", "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config",
))  # fmt: skip
_READ = frozenset(("peft_type", "bias", "r", "lora_alpha", "use_rslora", "target_modules"))
# Ways to initialise A and B that do not change the model's own weights; the others subtract from them.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def read_adapter(
    folder: Path, config: ModelConfig, *, max_rank: int, dtype: torch.dtype, device: torch.device
) -> LoraWeights:
    """The adapter's weights for a model of this shape. Raises an EngineAdapterError."""
    if not folder.is_dir():
        raise AdapterNotFound(f"adapter folder {folder} does not exist")
    rank, scale, targets = _read_settings(folder, max_rank)
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        if (folder / "adapter_model.bin").is_file():
            raise AdapterUnsupported(f"{folder} has adapter_model.bin; this engine reads safetensors only")
        raise AdapterNotFound(f"{path} does not exist")
    try:
        with no_room_without_memory(f"for {path}"), safe_open(str(path), framework="pt") as file:
            return _read_weights(path, file, config, rank, scale, targets, dtype, device)
    except (SafetensorError, OSError) as error:
        raise AdapterUnreadable(
            f"{path} is truncated or not a safetensors file: {one_line(error)}"
        ) from error


def _read_settings(folder: Path, max_rank: int) -> tuple[int, float, frozenset[str]]:
    path = folder / "adapter_config.json"
    try:
        raw = read_json(path)
    except ModelNotFound as error:
        raise AdapterNotFound(str(error)) from error
    except ModelTruncated as error:
        raise AdapterUnreadable(str(error)) from error

    kind = raw.get("peft_type")
    if kind != "LORA":
        raise AdapterUnsupported(f"{path}: peft_type is {kind!r}; this engine runs 'LORA'")
    if raw.get("bias", "none") != "none":
        raise AdapterUnsupported(f"{path} sets bias to {raw['bias']!r}; this engine runs 'none'")
    if raw.get("init_lora_weights", True) not in _INITS:
        init = raw["init_lora_weights"]
        raise AdapterUnsupported(f"{path}: init_lora_weights {init!r} changes the model's own weights")
    for key, value in raw.items():
        if value and key not in _INFORMATIVE and key not in _READ:
            raise AdapterUnsupported(f"{path} sets {key}, which this engine does not run")

    rank, alpha, targets = raw.get("r"), raw.get("lora_alpha"), raw.get("target_modules")
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise AdapterUnsupported(f"{path}: r is {rank!r}; this engine runs 1 to {max_rank} (max_lora_rank)")
    if not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise AdapterUnsupported(f"{path}: lora_alpha is {alpha!r}, not a finite number")
    known = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    if not isinstance(targets, list) or not targets or not all(one in known for one in targets):
        raise AdapterUnsupported(
            f"{path}: target_modules is {targets!r}; this engine adapts {', '.join(known)}"
        )
    return rank, alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank), frozenset(targets)


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
        if not tensor.isfinite().all():
            raise AdapterMismatch(f"{path}: {name} has a value that is not finite")
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
        return a.to(device, dtype).unsqueeze(0), b.to(device, dtype).unsqueeze(0)

    layers = tuple(
        {product: pair(layer, product) for product in products} for layer in range(config.num_layers)
    )
    if left:
        raise AdapterMismatch(f"{path} has {len(left)} tensors that the model has no place for: {min(left)}")
    return LoraWeights(layers)
