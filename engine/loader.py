"""Reads a Hugging Face checkpoint folder: config.json, safetensors (one file or sharded), tokenizer.json.

Every defect of the folder raises an ``EngineStartError`` whose message names the file.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from engine.errors import InvalidConfig, ModelNotFound, ModelTruncated, UnsupportedArchitecture
from engine.model import LayerWeights, LinearScaling, Llama3Scaling, ModelConfig, ModelWeights
from engine.operators import Linear

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Settings of config.json that are refused when set: they change the computation in ways not implemented.
REFUSED_OPTIONS = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(folder: Path) -> ModelConfig:
    """The model's shape. Raises ModelNotFound, ModelTruncated or UnsupportedArchitecture."""
    if not folder.is_dir():
        raise ModelNotFound(f"model folder {folder} does not exist")
    raw = read_json(folder / "config.json")
    architecture = (raw.get("architectures") or [raw.get("model_type", "unknown")])[0]
    if architecture not in ARCHITECTURES:
        runs = ", ".join(ARCHITECTURES)
        raise UnsupportedArchitecture(f"{folder} is a {architecture}; this engine runs {runs}")
    for option in REFUSED_OPTIONS:
        if raw.get(option):
            raise UnsupportedArchitecture(f"{folder} sets {option}, which this engine does not run")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedArchitecture(
            f"{folder} uses the activation {raw['hidden_act']}; this engine runs silu"
        )
    try:
        return _parse_config(raw, architecture, _eos_token_ids(folder, raw))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelTruncated(f"{folder / 'config.json'} lacks or misstates a value: {error!r}") from error


def read_weights(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """All weights, fused and converted to ``dtype``. Raises ModelNotFound or ModelTruncated."""
    tensors = _Tensors(folder, dtype, device)
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size

    def layer(index: int) -> LayerWeights:
        def take(name: str, *shape: int, kind: str = "weight") -> torch.Tensor:
            return tensors.take(f"model.layers.{index}.{name}.{kind}", *shape)

        qkv = (("q", heads), ("k", kv_heads), ("v", kv_heads))
        weights = [take(f"self_attn.{name}_proj", size, hidden) for name, size in qkv]
        bias = head_norm = None
        if config.qkv_bias:
            bias = torch.cat([take(f"self_attn.{name}_proj", size, kind="bias") for name, size in qkv])
        if config.head_norm:
            norms = [take(f"self_attn.{name}_norm", config.head_dim) for name in "qk"]
            counts = (config.num_heads, config.num_kv_heads)
            head_norm = torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])
        gate, up = (take(f"mlp.{name}_proj", inner, hidden) for name in ("gate", "up"))
        return LayerWeights(
            input_norm=take("input_layernorm", hidden),
            qkv=Linear(torch.cat(weights), bias),
            output=Linear(take("self_attn.o_proj", hidden, heads)),
            post_norm=take("post_attention_layernorm", hidden),
            gate_up=Linear(torch.cat([gate, up])),
            down=Linear(take("mlp.down_proj", hidden, inner)),
            head_norm=head_norm,
        )

    embedding = tensors.take("model.embed_tokens.weight", config.vocab_size, hidden)
    head = embedding if config.tie_embeddings else tensors.take("lm_head.weight", config.vocab_size, hidden)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=tensors.take("model.norm.weight", hidden),
        head=Linear(head),
    )


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer. Raises ModelNotFound or ModelTruncated."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelTruncated(f"{path} is not a readable tokenizer: {one_line(error)}") from error


def resolve_device(name: str) -> torch.device:
    """The device of this name; ``auto`` prefers CUDA. Raises InvalidConfig if there is none."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(f"engine.device is {name!r}, but there is no CUDA device; allowed: cpu or auto")
    return device


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of this name; ``auto`` is the checkpoint's dtype on CUDA and float32 on the CPU.

    On the CPU float32 is faster for one stream and equal for 32 (model of 5 M parameters; only long prompts
    are slower), and its tokens do not depend on the batch.
    """
    wanted = name if name != "auto" else ("float32" if device.type == "cpu" else config.dtype)
    if wanted not in DTYPES:
        raise InvalidConfig(f"dtype {wanted!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]


class _Tensors:
    """The checkpoint's tensors by name, from one or several files."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict):
                raise ModelTruncated(f"{index} has no weight_map of tensor names to files")
            names = sorted(set(files.values()))
        elif single.is_file():
            names = [single.name]
        else:
            raise ModelNotFound(f"{folder} has neither {single.name} nor {index.name}")
        self._files: dict[str, Any] = {}
        for name in names:
            self._open(folder / name)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor ``name``, converted. Raises ModelTruncated if it is missing or has another shape."""
        if name not in self._files:
            raise ModelTruncated(f"{self._folder} lacks the tensor {name}")
        try:
            tensor: torch.Tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise ModelTruncated(
                f"{self._folder}: tensor {name} is not readable: {one_line(error)}"
            ) from error
        if tensor.shape != shape:
            raise ModelTruncated(f"{self._folder}: {name} is {tuple(tensor.shape)}, config.json says {shape}")
        return tensor.to(self._device, self._dtype)

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise ModelNotFound(f"{path} does not exist, though the index names it")
        try:
            file: Any = safe_open(str(path), framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))
        except (SafetensorError, OSError) as error:
            raise ModelTruncated(
                f"{path} is truncated or not a safetensors file: {one_line(error)}"
            ) from error


def _parse_config(raw: dict[str, Any], architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    # transformers 5 writes rope_parameters; earlier versions write rope_theta next to rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    heads = int(raw["num_attention_heads"])
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        max_position=int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rope_scaling=_parse_rope_scaling(rope),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        head_norm=architecture == "Qwen3ForCausalLM",
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=eos_token_ids,
    )


def _parse_rope_scaling(rope: dict[str, Any]) -> LinearScaling | Llama3Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=float(rope["factor"]))
    if kind != "llama3":
        raise UnsupportedArchitecture(
            f"rope scaling {kind!r} is not supported; default, linear and llama3 are"
        )
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    found = (one.get("eos_token_id") for one in (generation, raw))
    eos: Any = next((one for one in found if one is not None), [])
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelNotFound or ModelTruncated."""
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelTruncated(f"{path} is not readable JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelTruncated(f"{path} is not a JSON object")
    return content


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
