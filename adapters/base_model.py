"""The base model's linear layers, which an adapter must fit, read from its ``config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Decoders whose layers have these seven products, with these names.
LLAMA_LIKE = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "granite", "olmo2", "smollm3"}
)
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The properties of the served base model that an adapter must fit.

    ``shapes`` is module name to (inputs, outputs); empty for an unknown architecture: an adapter's shapes are
    then compared with each other only. ``aliases`` are other names of the base model that adapters may give;
    ``embedded``: the embedded engine runs the model, which adapts all layers or none.
    """

    model_id: str
    layers: int
    shapes: Mapping[str, tuple[int, int]]
    max_lora_rank: int
    aliases: tuple[str, ...] = ()
    embedded: bool = False

    def tensor_name(self, layer: str, module: str, side: str) -> str | None:
        """PEFT's name of an adapter's tensor; ``None`` for an unknown architecture."""
        if module not in self.shapes:
            return None
        part = "self_attn" if module in _ATTENTION else "mlp"
        return f"base_model.model.model.layers.{int(layer)}.{part}.{module}.lora_{side}.weight"

    def serves(self, name: str) -> bool:
        """Whether ``name`` is this model; only the last part of a path or of ``org/name`` counts, since
        training scripts write both."""
        return name in (self.model_id, *self.aliases) or name.rstrip("/").rsplit("/", 1)[-1] == self.model_id


def base_model(
    model_id: str,
    config: Mapping[str, Any],
    *,
    max_lora_rank: int,
    aliases: tuple[str, ...] = (),
    embedded: bool = False,
) -> BaseModel:
    hidden, heads = int(config.get("hidden_size", 0)), int(config.get("num_attention_heads", 0))
    shapes: Mapping[str, tuple[int, int]] = {}
    if config.get("model_type") in LLAMA_LIKE and hidden and heads:
        width = int(config.get("head_dim") or hidden // heads)
        queries, keys = heads * width, int(config.get("num_key_value_heads") or heads) * width
        inner = int(config["intermediate_size"])
        shapes = {
            "q_proj": (hidden, queries),
            "k_proj": (hidden, keys),
            "v_proj": (hidden, keys),
            "o_proj": (queries, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }
    layers = int(config.get("num_hidden_layers", 0))
    return BaseModel(model_id, layers, MappingProxyType(dict(shapes)), max_lora_rank, aliases, embedded)
