"""Computes how many KV blocks fit into memory, with the arithmetic line by line for the log."""

from dataclasses import dataclass

from engine.errors import InvalidConfig
from engine.model import ModelConfig
from engine.values import GIB

# Memory of a step besides weights and cache: activations and temporary buffers of an 8B model.
ACTIVATION_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class KvPoolSize:
    """The size of the pool; ``arithmetic`` explains it in lines of text."""

    num_blocks: int
    arithmetic: tuple[str, ...]


def compute_kv_pool_size(
    gpu_memory_bytes: int,
    model: ModelConfig,
    *,
    item_bytes: int = 2,
    block_size: int = 16,
    utilization: float = 1.0,
    weights_bytes: int | None = None,
    activation_bytes: int = ACTIVATION_BYTES,
) -> KvPoolSize:
    """The number of blocks that fit into the memory not taken by weights and activations.

    ``item_bytes`` is the size of a cached number and of a weight. If ``weights_bytes`` is None, it is
    computed from the model's parameters. Raises InvalidConfig when not even one block fits.
    """
    if weights_bytes is None:
        weights_bytes = model.num_parameters * item_bytes
    token_bytes = model.kv_bytes_per_token(item_bytes)
    block_bytes = token_bytes * block_size
    free = int(gpu_memory_bytes * utilization) - weights_bytes - activation_bytes
    num_blocks = max(0, free) // block_bytes
    size = KvPoolSize(
        num_blocks,
        (
            f"a token: 2 (key and value) x {model.num_layers} layers x {model.num_kv_heads} KV heads "
            f"x {model.head_dim} x {item_bytes} bytes = {_size(token_bytes)}",
            f"a block: {block_size} tokens x {_size(token_bytes)} = {_size(block_bytes)}",
            f"for blocks: {_size(gpu_memory_bytes)} x {utilization:g} - {_size(weights_bytes)} weights "
            f"- {_size(activation_bytes)} activations = {_size(free)}",
            f"blocks: {_size(free)} / {_size(block_bytes)} = {num_blocks:,}, "
            f"room for {num_blocks * block_size:,} tokens",
        ),
    )
    if num_blocks < 1:
        raise InvalidConfig(f"not even one KV block fits; {'; '.join(size.arithmetic)}")
    return size


def _size(size_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes} bytes"
