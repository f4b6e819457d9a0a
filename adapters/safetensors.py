"""Reads a safetensors file's header, and checks in pieces that its numbers are finite; executes nothing.

Format: eight bytes with the header's length (little endian), the header in JSON, then the tensors' bytes
without gaps (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from adapters.errors import AdapterRejected, Rejection

CHUNK_BYTES = 1 << 20  # a multiple of every item's size

# All exponent bits of NaN and infinity are ones. Numbers are little endian: the last byte has the sign and
# the exponent's first bits, the byte before it the other exponent bits.
_HALF_EXPONENT = re.compile(rb"[\x7c-\x7f\xfc-\xff]")
_FULL_EXPONENT = re.compile(rb"[\x7f\xff]")


def _half(data: bytes) -> bool:
    return _HALF_EXPONENT.search(data[1::2]) is None


def _wide(item: int, rest: int) -> Callable[[bytes], bool]:
    """The check for items of ``item`` bytes; ``rest``: mask of the exponent bits in the last byte but one."""

    def finite(data: bytes) -> bool:
        before = data[item - 2 :: item]
        return not any(
            before[found.start()] & rest == rest for found in _FULL_EXPONENT.finditer(data[item - 1 :: item])
        )

    return finite


_CHECKS: Mapping[str, Callable[[bytes], bool]] = {
    "F16": _half,
    "BF16": _wide(2, 0x80),
    "F32": _wide(4, 0x80),
    "F64": _wide(8, 0xF0),
}


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


LENGTH_BYTES = 8
# The format allows 100 MB; the header of an adapter with thousands of tensors has a few hundred kilobytes.
MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 8  # an adapter's tensors have two
METADATA = "__metadata__"

# Bytes per number. Integers and 8-bit floats are not used for adapters' weights.
ITEM_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor: its type and shape, and its byte range in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> Mapping[str, TensorPlace]:
    """The tensors of a file, by name. Blocks; reads the header only. Raises AdapterRejected."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
            raise _rejected(
                Rejection.TRUNCATED,
                path,
                f"the file has {size:,} bytes; its header alone should have {LENGTH_BYTES + length:,}",
            )
        if length > MAX_HEADER_BYTES:
            raise _rejected(
                Rejection.BAD_HEADER, path, f"a header of {length:,} bytes; allowed: {MAX_HEADER_BYTES:,}"
            )
        raw = file.read(length)
    entries = _entries(path, raw)
    start = LENGTH_BYTES + length
    tensors = {name: _place(path, name, entry, start) for name, entry in entries.items()}
    _check_layout(path, tensors, start, size)
    return MappingProxyType(tensors)


def _entries(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        why = str(error).split("\n")[0]
        raise _rejected(Rejection.BAD_HEADER, path, f"the header is not the JSON it must be: {why}") from None
    if not isinstance(parsed, dict):
        raise _rejected(Rejection.BAD_HEADER, path, "the header is no JSON object")
    parsed.pop(METADATA, None)
    if not 1 <= len(parsed) <= MAX_TENSORS:
        raise _rejected(Rejection.BAD_HEADER, path, f"{len(parsed):,} tensors; allowed: 1 to {MAX_TENSORS:,}")
    return parsed


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _place(path: Path, name: str, entry: object, start: int) -> TensorPlace:
    def bad(why: str) -> AdapterRejected:
        return _rejected(Rejection.BAD_HEADER, path, f"tensor {name!r}: {why}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise bad(f"dtype {dtype!r}; allowed: {', '.join(ITEM_BYTES)}")
    # A product of many factors is computed in one step, which would stop all other threads for minutes.
    if not _whole(shape) or len(shape) > MAX_DIMENSIONS or not _whole(offsets) or len(offsets) != 2:
        raise bad(f"shape (at most {MAX_DIMENSIONS}) and data_offsets (2) must be whole numbers from 0")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise bad(f"{end - begin:,} bytes do not hold {dtype} {shape}")
    return TensorPlace(name, dtype, tuple(shape), start + begin, start + end)


def _whole(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)


def _check_layout(path: Path, tensors: Mapping[str, TensorPlace], start: int, size: int) -> None:
    at = start
    for tensor in sorted(tensors.values(), key=lambda one: (one.begin, one.end)):
        if tensor.begin != at:
            what = "overlaps the one before" if tensor.begin < at else "leaves a gap before it"
            raise _rejected(Rejection.BAD_HEADER, path, f"tensor {tensor.name!r} {what}")
        at = tensor.end
    if at > size:
        raise _rejected(Rejection.TRUNCATED, path, f"the file has {size:,} bytes; its tensors end at {at:,}")
    if at < size:
        raise _rejected(Rejection.BAD_HEADER, path, f"{size - at:,} bytes after the last tensor")


def _rejected(code: Rejection, path: Path, detail: str) -> AdapterRejected:
    return AdapterRejected(code, f"{path.name}: {detail}")
