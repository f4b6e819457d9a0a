"""GPUs by name, and the parts of a model that take memory: from its ``config.json`` or a preset."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Bytes per number in each format; 4-bit formats have a 16-bit scale and a 4-bit zero for each group of 128
# weights (the usual group size of AWQ and GPTQ).
_GROUP = 128
_FOUR_BIT = 0.5 + (2 + 0.5) / _GROUP
LINEAR_BYTES: Mapping[str, float] = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "awq": _FOUR_BIT,
    "gptq": _FOUR_BIT,
}
# vLLM's names of the same formats.
_ALIASES: Mapping[str, str] = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "w8a8": "int8",
    "half": "float16",
    "float": "float32",
    "auto": "bfloat16",
}
# Keys of config.json of models whose KV cache or layers the arithmetic does not cover.
_OTHER_KINDS = (
    "kv_lora_rank",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "ssm_cfg",
    "mamba_d_state",
)


GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; ``memory_bytes`` is the memory that CUDA reports; the utilization is a share of it."""

    name: str
    memory_bytes: int


# The memory that CUDA reports, rounded down: less than the name says, because the driver and error correction
# take some. `nvidia-smi` shows a little more; another card or driver needs --gpu-memory-gib.
GPUS: Mapping[str, Gpu] = {
    name: Gpu(name, int(gib * GIB))
    for name, gib in (("A10G", 22.0), ("A100-40GB", 39.4), ("A100-80GB", 79.1), ("H100-80GB", 79.1))
}


class PlanError(Exception):
    """No plan can be made; the message is one line that says what to change."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with grouped query attention.

    Args:
        weights_format: format of the linear layers, a key of ``LINEAR_BYTES``; embeddings, norms, activations
            and (unless quantized itself) the KV cache take 16 bits even if it is quantized.
        weights_bytes: the size of the files; None computes it.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool
    max_position: int
    weights_format: str
    weights_bytes: int | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of an activation, and of a number in the KV cache."""
        return 4 if self.weights_format == "float32" else 2

    @property
    def layer_parameters(self) -> int:
        """Number of weights in the linear layers of one decoder layer."""
        queries, keys = self.head_dim * self.num_heads, self.head_dim * self.num_kv_heads
        attention = self.hidden_size * (2 * queries + 2 * keys)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def embedding_parameters(self) -> int:
        """Number of weights in one of the two matrices over the vocabulary."""
        return self.vocab_size * self.hidden_size

    @property
    def lora_parameters_per_rank(self) -> int:
        """Number of weights of a rank-1 adapter in one layer: inputs plus outputs of seven linear layers."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.head_dim * self.num_heads, self.head_dim * self.num_kv_heads
        attention = 2 * (hidden + queries) + 2 * (hidden + keys)
        return attention + 3 * (hidden + inner)


_LLAMA_3_1_8B = ModelShape(
    "Llama-3.1-8B",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    tie_embeddings=False,
    max_position=131_072,
    weights_format="bfloat16",
)
# The figures of Meta's published config.json.
PRESETS: Mapping[str, ModelShape] = {
    "llama-3.1-8b": _LLAMA_3_1_8B,
    "llama-3-8b-awq": replace(_LLAMA_3_1_8B, name="Llama-3-8B AWQ", max_position=8192, weights_format="awq"),
}


def find_model(given: str, *, dtype: str = "auto", quantization: str | None = None) -> ModelShape:
    """The shape of a preset or of the model in a folder.

    Args:
        given: a preset's name, a folder with ``config.json``, or that file.
        dtype: ``auto`` uses the checkpoint's.
        quantization: the engine's, if it quantizes weights while loading; None uses the checkpoint's.

    Raises PlanError: there is no such preset or file, or the kind of model is not supported here.
    """
    if given in PRESETS:
        return PRESETS[given]
    path = Path(given)
    file = path if path.name == "config.json" else path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise PlanError(
            f"no model {given!r}: give a folder with config.json, or a preset: {', '.join(PRESETS)}"
        ) from None
    except ValueError:
        raise PlanError(f"{file}: not readable JSON") from None
    if not isinstance(raw, dict):
        raise PlanError(f"{file}: not a JSON object")
    shape = read_shape(raw, name=file.resolve().parent.name, dtype=dtype, quantization=quantization)
    files = sum(one.stat().st_size for one in file.parent.glob("*.safetensors"))
    # The size of the files is exact, unless the weights are converted while loading.
    stored_bytes = LINEAR_BYTES.get(_weights_format(raw))
    if files and LINEAR_BYTES[shape.weights_format] == stored_bytes:
        return replace(shape, weights_bytes=files)
    return shape


def _weights_format(raw: Mapping[str, Any], dtype: str = "auto", quantization: str | None = None) -> str:
    text, quantized = raw.get("text_config") or raw, raw.get("quantization_config") or {}
    carried = text.get("dtype") or text.get("torch_dtype") or raw.get("torch_dtype") or "auto"
    chosen = quantization or quantized.get("quant_method") or (carried if dtype == "auto" else dtype)
    return _ALIASES.get(str(chosen), str(chosen))


def read_shape(
    raw: Mapping[str, Any], *, name: str, dtype: str = "auto", quantization: str | None = None
) -> ModelShape:
    """The shape described by a ``config.json``.

    Raises PlanError: a field is missing, or the kind of model is not supported here.
    """
    text, quantized = raw.get("text_config") or raw, raw.get("quantization_config") or {}
    if not (isinstance(text, dict) and isinstance(quantized, dict)):
        raise PlanError(f"{name}: config.json misstates a value: text_config or quantization_config")
    other = next((field for field in _OTHER_KINDS if text.get(field)), None)
    if other is not None:
        raise PlanError(
            f"{name}: config.json has {other!r}: mixtures of experts, latent attention and state spaces are "
            "not counted here; start vLLM once and read the KV cache size in its log"
        )
    weights_format = _weights_format(raw, dtype, quantization)
    if weights_format not in LINEAR_BYTES:
        raise PlanError(
            f"{name}: weights in {weights_format!r} are not counted here; known: {', '.join(LINEAR_BYTES)}"
        )
    try:
        heads = int(text["num_attention_heads"])
        hidden = int(text["hidden_size"])
        return ModelShape(
            name,
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=hidden,
            intermediate_size=int(text["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            vocab_size=int(text["vocab_size"]),
            tie_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            max_position=int(text["max_position_embeddings"]),
            weights_format=weights_format,
        )
    except KeyError as missing:
        raise PlanError(f"{name}: config.json has no {missing.args[0]!r}; is it a decoder's?") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise PlanError(f"{name}: config.json misstates a value: {error}") from None
