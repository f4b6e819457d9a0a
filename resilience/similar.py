"""A small model of which questions mean the same: a vector a word, made by ``models/train_embedding.py``.

A question's vector is the sum of its words' vectors, normalized; how much a word counts is its vector's
length, learned as well. Plain Python: a few thousand words of 64 numbers need no library, and a question
takes a tenth of a millisecond, off the event loop.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path

from resilience.response_cache_text import MAX_CHARS, Reader, features

FORMAT = 1
FILE_NAME = "words.json"


class SimilarModelError(Exception):
    """The folder holds no model that can be used; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a question means, as far as the model can tell.

    Args:
        facts: what another question must say too, word by word, to be the same.
        vector: of length 1; empty when no word is known.
        threshold: the least similarity at which a question of these facts is the same.
    """

    facts: tuple[str, ...]
    vector: tuple[float, ...]
    threshold: float

    def similarity(self, other: Sequence[float]) -> float:
        """The cosine with the other vector; 1 when neither question has a known word."""
        if not self.vector or not other:
            return 1.0 if not self.vector and not other else 0.0
        return float(sum(map(mul, self.vector, other)))


class SimilarQuestions:
    """Embeds questions. Thread-safe: nothing changes after the start.

    Args:
        words: each word's vector; all of one length.
        threshold: for questions of the field that the model was made for.
        strict: for all others.
        fingerprint: tells this model from any other.
    """

    def __init__(
        self, words: Mapping[str, Sequence[float]], *, threshold: float, strict: float, fingerprint: str = ""
    ) -> None:
        self.words = words
        self._reader = Reader(words.keys())
        self.threshold = threshold
        self.strict = strict
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        """Words known."""
        return len(self.words)

    @classmethod
    def from_folder(cls, folder: Path, *, threshold: float | None = None) -> SimilarQuestions:
        """Read a trained model; ``threshold`` takes the place of its own.

        Raises:
            SimilarModelError: the file is missing or not such a model.
        """
        path = folder / FILE_NAME
        try:
            content = path.read_bytes()
            data = json.loads(content)
            if data["format"] != FORMAT:
                raise SimilarModelError(f"{path}: format is {data['format']!r}; allowed: {FORMAT}")
            size = int(data["dimensions"])
            words = {word: _vector(code, size) for word, code in data["words"].items()}
            own, strict = float(data["threshold"]), float(data["strict"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise SimilarModelError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
        asked = own if threshold is None else threshold
        fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
        return cls(words, threshold=asked, strict=max(asked, strict), fingerprint=fingerprint)

    def meaning(self, text: str) -> Meaning | None:
        """What ``text`` means; ``None`` for a text that is empty or too long to be one question."""
        if not text.strip() or len(text) > MAX_CHARS:
            return None
        reading = self._reader.read(text)
        if not reading.known and not reading.facts:
            return None
        vectors = [self.words[feature] for feature in features(reading.known) if feature in self.words]
        total = [sum(column) for column in zip(*vectors, strict=True)]
        length = math.sqrt(sum(map(mul, total, total)))
        vector = tuple(value / length for value in total) if length else ()
        return Meaning(reading.facts, vector, self.strict if reading.foreign else self.threshold)


def _vector(code: str, size: int) -> array[int]:
    # Whole numbers in a byte each: the common factor between them and what was learned ends in normalizing.
    numbers = array("b", base64.b64decode(code, validate=True))
    if len(numbers) != size:
        raise ValueError(f"a vector has {len(numbers)} numbers instead of {size}")
    return numbers
