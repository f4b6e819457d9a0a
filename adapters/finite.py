"""Whether stored numbers are finite, by their bytes alone: no array library, nothing loaded whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import BinaryIO

from adapters.safetensors_header import TensorPlace

# A multiple of every item's size.
CHUNK_BYTES = 1 << 20

# NaN and infinity have an exponent of ones. Numbers are little endian: the last byte holds the sign and the
# exponent's first bits, the one before it the rest of the exponent.
_HALF_EXPONENT = re.compile(rb"[\x7c-\x7f\xfc-\xff]")
_FULL_EXPONENT = re.compile(rb"[\x7f\xff]")


def _half(data: bytes) -> bool:
    return _HALF_EXPONENT.search(data[1::2]) is None


def _wide(item: int, rest: int) -> Callable[[bytes], bool]:
    """For items of ``item`` bytes, of whose last byte but one the bits ``rest`` belong to the exponent."""

    def finite(data: bytes) -> bool:
        before = data[item - 2 :: item]
        return not any(
            before[found.start()] & rest == rest for found in _FULL_EXPONENT.finditer(data[item - 1 :: item])
        )

    return finite


_CHECKS: Mapping[str, Callable[[bytes], bool]] = MappingProxyType(
    {"F16": _half, "BF16": _wide(2, 0x80), "F32": _wide(4, 0x80), "F64": _wide(8, 0xF0)}
)


def is_finite(file: BinaryIO, tensor: TensorPlace) -> bool:
    """Whether no number of the tensor is NaN or infinite. Blocks; reads in pieces."""
    check, left = _CHECKS[tensor.dtype], tensor.end - tensor.begin
    file.seek(tensor.begin)
    while left:
        data = file.read(min(CHUNK_BYTES, left))
        if not data or not check(data):
            return False
        left -= len(data)
    return True
