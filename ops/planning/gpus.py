"""GPUs by name, and the memory of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; ``memory_bytes`` is what a program sees of it, which the utilization is a share of."""

    name: str
    memory_bytes: int


# What CUDA tells programs, rounded down: less than the name says, since the driver and error correction keep
# some. `nvidia-smi` shows a little more; another card, or another driver, wants --gpu-memory-gib.
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        name: Gpu(name, int(gib * GIB))
        for name, gib in (("A10G", 22.0), ("A100-40GB", 39.4), ("A100-80GB", 79.1), ("H100-80GB", 79.1))
    }
)
