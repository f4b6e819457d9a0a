"""Pairs of questions that an operator has judged, and how each threshold classifies them."""

import base64
import binascii
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Annotated, Any, Final

import msgspec

from gateway.generation.answer_cache import MAX_QUESTION_CHARS
from ops.client import AdminClient, AdminError
from resilience.question_vectors import cosine, numbers_in, unit_vector

MAX_PAIRS: Final = 10_000
BATCH: Final = 128  # texts per embedding request
EMBED_TIMEOUT_S: Final = 300.0  # timeout of one embedding request; a small model on a CPU takes some seconds
DECIMALS: Final = 3
SHOWN: Final = 10  # number of thresholds shown in addition to the proposed one

_Question = Annotated[str, msgspec.Meta(pattern=r"\S", max_length=MAX_QUESTION_CHARS)]


@dataclass(frozen=True, slots=True)
class QuestionPair:
    """Two questions; ``same``: the answer to one answers the other."""

    a: _Question
    b: _Question
    same: bool


@dataclass(frozen=True, slots=True)
class ThresholdScore:
    """Pairs that a threshold classifies as the same, correctly (``right``) or not (``wrong``).

    ``precision`` is the share of right ones among these pairs, 1 if there are none; ``recall`` is the share
    of right ones among all pairs that are the same.
    """

    threshold: float
    right: int
    wrong: int
    precision: float
    recall: float


def read_pairs(path: Path) -> list[QuestionPair]:
    """Read pairs from a file of JSON lines. Raises AdminError, which names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AdminError(f"--pairs: {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    pairs = [_pair(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if len(pairs) > MAX_PAIRS:
        raise AdminError(f"--pairs: {path} has {len(pairs)} pairs; allowed: at most {MAX_PAIRS}")
    if not {True, False} == {pair.same for pair in pairs}:
        raise AdminError(f"--pairs: {path} has one kind of pairs; allowed: some the same and some not")
    return pairs


def _pair(line: str, place: str) -> QuestionPair:
    try:
        return msgspec.json.decode(line, type=QuestionPair)
    except msgspec.DecodeError as error:
        allowed = f'{{"a": "…", "b": "…", "same": true}}, with texts of up to {MAX_QUESTION_CHARS} characters'
        raise AdminError(f"{place}: {error}; allowed: {allowed}") from None


def embedded(
    client: AdminClient, model: str, pairs: Sequence[QuestionPair], advance: Callable[[int], None]
) -> Mapping[str, bytes]:
    """The vector of each question; ``advance`` is called with the number of new ones. Raises AdminError."""
    vectors: dict[str, bytes] = {}
    all_texts = unique_texts(pairs)
    for start in range(0, len(all_texts), BATCH):
        texts = all_texts[start : start + BATCH]
        body = {"model": model, "input": texts, "encoding_format": "base64"}
        answer = client.post("v1", "embeddings", body=body)
        vectors.update(zip(texts, _vectors(answer, len(texts)), strict=True))
        advance(len(texts))
    return vectors


def unique_texts(pairs: Sequence[QuestionPair]) -> list[str]:
    return list(dict.fromkeys(text for pair in pairs for text in (pair.a, pair.b)))


def _vectors(answer: Any, count: int) -> Iterator[bytes]:
    try:
        data = sorted(answer["data"], key=lambda one: one["index"])
        vectors = [unit_vector(base64.b64decode(one["embedding"], validate=True)) for one in data]
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise AdminError("the answer to /v1/embeddings is not OpenAI's") from None
    if len(vectors) != count:
        raise AdminError(f"/v1/embeddings gave {len(vectors)} vectors for {count} texts")
    for vector in vectors:
        if vector is None:
            raise AdminError("/v1/embeddings gave a vector of zeros or of numbers that are not finite")
        yield vector


class JudgedPairs:
    """Similarities of pairs as in the response cache: questions with different numbers are never similar."""

    def __init__(self, pairs: Sequence[QuestionPair], vectors: Mapping[str, bytes]) -> None:
        found: dict[bool, list[float]] = {True: [], False: []}
        # Pairs that the cache does not compare, because the numbers in their questions differ.
        self.never: dict[bool, int] = {True: 0, False: 0}
        for pair in pairs:
            if numbers_in(pair.a) != numbers_in(pair.b):
                self.never[pair.same] += 1
            else:
                found[pair.same].append(cosine(vectors[pair.a], vectors[pair.b]))
        self._same, self._different = sorted(found[True]), sorted(found[False])
        self.same = len(self._same) + self.never[True]
        self.different = len(self._different) + self.never[False]

    def at(self, threshold: float) -> ThresholdScore:
        right = len(self._same) - bisect_left(self._same, threshold)
        wrong = len(self._different) - bisect_left(self._different, threshold)
        precision = right / (right + wrong) if right + wrong else 1.0
        return ThresholdScore(threshold, right, wrong, precision, right / self.same)

    def propose(self, precision: float) -> ThresholdScore | None:
        """The threshold with the most right pairs at this precision or better; ``None`` if none finds any.

        Of several thresholds that find equally many, it is the median, far from errors on both sides.
        """
        steps = [self.at(step / 10**DECIMALS) for step in range(1, 10**DECIMALS + 1)]
        usable = [one for one in steps if one.precision >= precision and one.right]
        if not usable:
            return None
        most = max(one.right for one in usable)
        return self.at(median_low([one.threshold for one in usable if one.right == most]))

    def table(self, proposed: ThresholdScore | None) -> list[ThresholdScore]:
        """Scores from the least similar same pair, or the most similar different one if lower, up to 1."""
        least = max(0.0, min([*self._same, *self._different[-1:]], default=0.0))
        steps = {round(least + (1.0 - least) * step / (SHOWN - 1), DECIMALS) for step in range(SHOWN)}
        if proposed is not None:
            steps.add(proposed.threshold)
        return [self.at(step) for step in sorted(steps) if step > 0]
