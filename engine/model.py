"""The decoder of Llama, Qwen2 and Qwen3 over a flattened batch: [tokens, hidden] all the way, no padding.

Per layer: RMSNorm, one product for queries, keys and values (Qwen2: with a bias), RMSNorm of each head's
query and key (Qwen3 only), rotary positions in place, keys and values written into the paged cache,
attention, output product, RMSNorm, one product for gate and up, SwiGLU, down product. After each product the
LoRA adapters of the batch, if it has any, add their part.
"""

import math
import mmap
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention import Group, attend
from engine.linear import Linear
from engine.lora import LoraBatch


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor``; ``rope_scaling`` of type ``linear`` in config.json."""

    factor: float

    def scale(self, frequencies: torch.Tensor) -> torch.Tensor:
        """The scaled frequencies."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's stretching of the low frequencies; ``rope_scaling`` of type ``llama3`` in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def scale(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Long wavelengths are divided by the factor, short ones kept, those between blended."""
        rotations = self.original_max_position * frequencies / (2 * math.pi)
        blend = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * frequencies / self.factor + blend * frequencies


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of the model, from config.json."""

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
        """Keys and values of one token in all layers (seed 002 §5.2: 128 KiB for Llama 3.1 8B in fp16)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_bytes

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint; tied embeddings count once."""
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
    """All weights; ``head`` shares the embedding's when they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear


@dataclass(frozen=True, slots=True)
class Ends:
    """The last token of every chunk, at ``rows`` of the batch, with groups and adapters for them alone."""

    rows: torch.Tensor
    groups: list[Group]
    lora: LoraBatch | None


class Decoder:
    """The forward pass. Holds weights and rotary tables, no state of any request."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_model_len: int) -> None:
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._weights = weights
        self._cos, self._sin = rotary_tables(config, max_model_len, self.dtype, self.device)
        self._norm_shape = (config.hidden_size,)
        self._query_size = config.num_heads * config.head_dim
        self._key_size = config.num_kv_heads * config.head_dim

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        groups: list[Group],
        cache: list[torch.Tensor],
        lora: LoraBatch | None = None,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        """Computes the tokens of one step and stores their keys and values in ``slots`` of ``cache``.

        All three index tensors are [tokens]; ``lora`` is None when no token has an adapter. Returns the
        hidden states after the final norm, [tokens, hidden]; with ``ends`` those of the ends only: after the
        last layer's keys and values nobody needs the others.
        """
        eps = self.config.rms_norm_eps
        x = F.embedding(token_ids, self._weights.embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        for index, (layer, layer_cache) in enumerate(zip(self._weights.layers, cache, strict=True)):
            normed = F.rms_norm(x, self._norm_shape, layer.input_norm, eps)
            qkv = layer.qkv(normed)
            if lora is not None:
                lora.add_to(qkv, normed, index, "qkv")
            query = self._rotate_and_store(qkv, layer.head_norm, cos, sin, slots, layer_cache)
            if ends is not None and layer is self._weights.layers[-1]:
                x, query, groups, lora = x[ends.rows], query[ends.rows], ends.groups, ends.lora
            attended = attend(query, layer_cache, groups)
            output = layer.output(attended)
            if lora is not None:
                lora.add_to(output, attended, index, "output")
            x = x + output
            normed = F.rms_norm(x, self._norm_shape, layer.post_norm, eps)
            gate_up = layer.gate_up(normed)
            if lora is not None:
                lora.add_to(gate_up, normed, index, "gate_up")
            gate, up = gate_up.chunk(2, dim=-1)
            inner = F.silu(gate).mul_(up)
            down = layer.down(inner)
            if lora is not None:
                lora.add_to(down, inner, index, "down")
            x = x + down
        return F.rms_norm(x, self._norm_shape, self._weights.final_norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary in float32, for the rows one wants to sample from."""
        return self._weights.head(hidden).float()

    def _rotate_and_store(
        self,
        qkv: torch.Tensor,
        head_norm: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        head_dim, query_size = self.config.head_dim, self._query_size
        rotated = qkv[:, : query_size + self._key_size].view(qkv.shape[0], -1, head_dim)
        if head_norm is not None:
            rotated.copy_(F.rms_norm(rotated, (head_dim,), None, self.config.rms_norm_eps).mul_(head_norm))
        swapped = rotated.roll(head_dim // 2, -1)  # the sign of the swapped half is in the table
        rotated.mul_(cos).addcmul_(swapped, sin)
        cache.view(-1, 2 * self._key_size).index_copy_(0, slots, qkv[:, query_size:])
        return qkv[:, :query_size].view(qkv.shape[0], -1, head_dim)


def rotary_tables(
    config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, [positions, 1, head_dim]; the first half of the sines negated."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling.scale(frequencies)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tables[0].unsqueeze(1).to(device, dtype), tables[1].unsqueeze(1).to(device, dtype)


def new_cache(config: ModelConfig, num_blocks: int, block_size: int, like: Decoder) -> list[torch.Tensor]:
    """The paged cache, one zeroed tensor [1 + num_blocks, block_size, 2, kv_heads, head_dim] a layer.

    Keys and values of a token lie together, so that one gather brings both. On the CPU the zeros come lazily
    from the operating system: a block takes memory once it is first used.
    """
    shape = (1 + num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
    if like.device.type != "cpu":
        return [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(config.num_layers)]
    return [_lazy_zeros(shape, like.dtype) for _ in range(config.num_layers)]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # torch.zeros writes every page; a fresh anonymous mapping is zero without being touched.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; gathering blocks from huge pages took a tenth less time
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
