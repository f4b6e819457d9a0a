"""The Llama decoder over a flattened batch: [tokens, hidden] all the way, no batch dimension, no padding.

Per layer: RMSNorm, one product for queries, keys and values, rotary positions in place, keys and values
written into the paged cache, attention, output product, RMSNorm, one product for gate and up, SwiGLU, down
product.
"""

import math
import mmap
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention import Group, attend
from engine.linear import Linear


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the low frequencies, from ``rope_scaling`` in config.json (type ``llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


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
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        """Keys and values of one token in all layers (seed 002 §5.2: 128 KiB for Llama 3.1 8B in fp16)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_bytes


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; ``qkv`` and ``gate_up`` are fused when loaded."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights; ``head`` shares the embedding's when they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear


class LlamaModel:
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
    ) -> torch.Tensor:
        """Computes the tokens of one step and stores their keys and values in ``slots`` of ``cache``.

        All three index tensors are [tokens]. Returns the hidden states after the final norm, [tokens,
        hidden].
        """
        eps = self.config.rms_norm_eps
        x = F.embedding(token_ids, self._weights.embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        for layer, layer_cache in zip(self._weights.layers, cache, strict=True):
            qkv = layer.qkv(F.rms_norm(x, self._norm_shape, layer.input_norm, eps))
            query = self._rotate_and_store(qkv, cos, sin, slots, layer_cache)
            x = x + layer.output(attend(query, layer_cache, groups))
            gate_up = layer.gate_up(F.rms_norm(x, self._norm_shape, layer.post_norm, eps))
            gate, up = gate_up.chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return F.rms_norm(x, self._norm_shape, self._weights.final_norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary in float32, for the rows one wants to sample from."""
        return self._weights.head(hidden).float()

    def _rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        head_dim, query_size = self.config.head_dim, self._query_size
        rotated = qkv[:, : query_size + self._key_size].view(qkv.shape[0], -1, head_dim)
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
        frequencies = _scale_llama3(frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tables[0].unsqueeze(1).to(device, dtype), tables[1].unsqueeze(1).to(device, dtype)


def _scale_llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    rotations = scaling.original_max_position / wavelengths
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def new_cache(config: ModelConfig, num_blocks: int, block_size: int, like: LlamaModel) -> list[torch.Tensor]:
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
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
