"""The decoder of Llama, Qwen2 and Qwen3 over a flattened batch: [tokens, hidden] all the way, no padding.

Per layer: RMSNorm, one product for queries, keys and values (Qwen2: with a bias), RMSNorm of each head's
query and key (Qwen3 only), rotary positions in place, keys and values written into the paged cache,
attention, output product, RMSNorm, one product for gate and up, SwiGLU, down product. After each product the
batch's LoRA adapters add their part.
"""

import math
import mmap
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention import GroupedAttention, Plan
from engine.lora import LoraBatch
from engine.operators import Linear, Operators


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides positions by ``factor``; ``rope_scaling`` of type ``linear`` in config.json."""

    factor: float

    def scale(self, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Stretches the low frequencies; ``rope_scaling`` of type ``llama3`` in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def scale(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Divide low frequencies by the factor, keep high ones, and blend those between."""
        rotations = self.original_max_position * frequencies / (2 * math.pi)
        blend = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * frequencies / self.factor + blend * frequencies


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of the model, from config.json.

    ``qkv_bias``: query, key and value have biases; ``head_norm``: each query and key head is normalised.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: LinearScaling | Llama3Scaling | None
    qkv_bias: bool
    head_norm: bool
    tie_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        """Size of the keys and values of one token in all layers (128 KiB for Llama 3.1 8B in fp16)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_bytes

    @property
    def num_parameters(self) -> int:
        """Number of weights in the checkpoint; tied embeddings count once."""
        qkv = self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        attention = self.hidden_size * (qkv + self.head_dim * self.num_heads)
        extras = qkv * self.qkv_bias + 2 * self.head_dim * self.head_norm
        layer = attention + extras + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; ``qkv`` and ``gate_up`` are fused when loaded. ``head_norm`` is [query heads + key
    heads, head_dim], or None.
    """

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    head_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights; ``head`` uses the tensor of ``embedding`` when they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear


@dataclass(frozen=True, slots=True)
class Ends:
    """The last tokens of all chunks, at ``rows`` of the batch; ``plan`` and ``lora`` are for these alone."""

    rows: torch.Tensor
    plan: Plan
    lora: LoraBatch | None


class Decoder:
    """The forward pass. It has weights and rotary tables, no state of requests."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        max_model_len: int,
        attention: GroupedAttention,
        operators: Operators,
    ) -> None:
        self.config = config
        self.attention = attention
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._weights = weights
        self._operators = operators
        self._cos, self._sin = rotary_tables(config, max_model_len, self.dtype, self.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        plan: Plan,
        cache: list[torch.Tensor],
        lora: LoraBatch | None = None,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        """Compute the tokens of one step and store their keys and values in ``slots`` of ``cache``.

        The three index tensors are [tokens]; ``lora`` is None when no token has an adapter. Returns the
        hidden states after the final norm, [tokens, hidden]; with ``ends`` only those of the last token of
        each chunk, since only they are sampled from.
        """
        do, layers = self._operators, self._weights.layers
        x = F.embedding(token_ids, self._weights.embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        normed = do.norm(x, layers[0].input_norm)
        for index, (layer, layer_cache) in enumerate(zip(layers, cache, strict=True)):
            is_last = index + 1 == len(layers)
            qkv = layer.qkv(normed)
            if lora is not None:
                lora.add_to(qkv, normed, index, "qkv")
            if layer.head_norm is not None:
                do.norm_heads(qkv, layer.head_norm)
            do.rotate_and_store(qkv, cos, sin, slots, layer_cache)
            if ends is not None and is_last:
                x, qkv, plan, lora = x[ends.rows], qkv[ends.rows], ends.plan, ends.lora
            attended = self.attention.attend(qkv, layer_cache, plan)
            output = layer.output(attended)
            if lora is not None:
                lora.add_to(output, attended, index, "output")
            normed = do.add_and_norm(x, output, layer.post_norm)
            gate_up = layer.gate_up(normed)
            if lora is not None:
                lora.add_to(gate_up, normed, index, "gate_up")
            inner = do.gate(gate_up)
            down = layer.down(inner)
            if lora is not None:
                lora.add_to(down, inner, index, "down")
            following = self._weights.final_norm if is_last else layers[index + 1].input_norm
            normed = do.add_and_norm(x, down, following)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits over the vocabulary in float32, for the rows to sample from."""
        return self._weights.head(hidden).float()


def rotary_tables(
    config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines of all positions, [positions, head_dim]; the first half of the sines negated."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling.scale(frequencies)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tables[0].to(device, dtype), tables[1].to(device, dtype)


def new_cache(config: ModelConfig, num_blocks: int, block_size: int, like: Decoder) -> list[torch.Tensor]:
    """The paged cache: per layer one zeroed tensor [1 + num_blocks, 2, block_size, kv_heads * head_dim]; a
    block has keys and then values.

    On the CPU the operating system provides the zeros lazily: a block takes memory when it is first used.
    """
    shape = (1 + num_blocks, 2, block_size, config.num_kv_heads * config.head_dim)
    if like.device.type != "cpu":
        return [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(config.num_layers)]
    return [_lazy_zeros(shape, like.dtype) for _ in range(config.num_layers)]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # torch.zeros writes every page; a new anonymous mapping is zero without being written.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; gathering blocks from huge pages took a tenth less time
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
