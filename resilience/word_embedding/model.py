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
from operator import mul
from pathlib import Path

from resilience.response_cache_values import Meaning
from resilience.word_embedding.question_text import MAX_CHARS, QuestionReader, features

FORMAT = 1
FILE_NAME = "words.json"


class EmbeddingError(Exception):
    """The folder holds no model that can be used; the message names the file and what is wrong."""


class WordEmbedding:
    """Embeds questions; immutable, so thread-safe.

    Args:
        words: each word's vector; all of one length.
        threshold: for questions of the field that the model was made for.
        strict: for all others.
        fingerprint: identifies this model.
    """

    def __init__(
        self, words: Mapping[str, Sequence[float]], *, threshold: float, strict: float, fingerprint: str = ""
    ) -> None:
        self.words = words
        self._reader = QuestionReader(words.keys())
        self.threshold = threshold
        self.strict = strict
        self.fingerprint = fingerprint

    @classmethod
    def from_folder(cls, folder: Path, *, threshold: float | None = None) -> WordEmbedding:
        """Read a trained model; ``threshold`` takes the place of its own.

        Raises:
            EmbeddingError: the file is missing or not such a model.
        """
        path = folder / FILE_NAME
        try:
            content = path.read_bytes()
            data = json.loads(content)
            if data["format"] != FORMAT:
                raise EmbeddingError(f"{path}: format is {data['format']!r}; allowed: {FORMAT}")
            size = int(data["dimensions"])
            words = {word: _vector(code, size) for word, code in data["words"].items()}
            own, strict = float(data["threshold"]), float(data["strict"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise EmbeddingError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
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
