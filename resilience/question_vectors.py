"""Vectors of questions: little-endian 32-bit floats, and how similar two of them are."""

import re
from collections.abc import Sequence
from math import isfinite, sqrt
from operator import mul
from struct import pack, unpack
from typing import Final

TRIED: Final = 3
"""Most similar questions whose answers are read: more than one, since an answer may have expired."""
_NUMBER: Final = re.compile(r"\d+(?:[.,:/-]\d+)*")


def nearest(
    vector: bytes, candidates: Sequence[tuple[str, bytes]], threshold: float
) -> list[tuple[float, str]]:
    """The best candidates with at least ``threshold``, as (similarity, key), best first."""
    found = [(cosine(vector, other), key) for key, other in candidates if len(other) == len(vector)]
    return sorted([one for one in found if one[0] >= threshold], reverse=True)[:TRIED]


def cosine(one: bytes, other: bytes) -> float:
    """The cosine similarity of two vectors of length 1; at most 1."""
    return min(1.0, float(sum(map(mul, _floats(one), _floats(other)))))


def unit_vector(vector: bytes) -> bytes | None:
    """The vector of length 1 in the same direction; ``None`` for a zero or not finite vector."""
    numbers = _floats(vector)
    length = sqrt(sum(map(mul, numbers, numbers)))
    if not (isfinite(length) and length > 0):
        return None
    return pack(f"<{len(numbers)}f", *[one / length for one in numbers])


def _floats(vector: bytes) -> tuple[float, ...]:
    return unpack(f"<{len(vector) // 4}f", vector)


def numbers_in(text: str) -> tuple[str, ...]:
    """The numbers of a question, in order; questions with different numbers are never similar.

    Embedding models hardly distinguish two order numbers or dates.
    """
    return tuple(_NUMBER.findall(text))
