"""Calls of a worker's ``/embeddings``, ``/rerank`` and ``/score``."""

from array import array
from binascii import b2a_base64
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, TypeVar

import msgspec
import orjson

from gateway.backends.workers.chunk_repair import plausible
from gateway.backends.workers.errors import BadHttp
from gateway.contracts.embeddings import Conversation, EmbeddingsAnswer, EmbeddingsRequest
from gateway.contracts.rerank import ScoreAnswer, ScoreRequest

T = TypeVar("T")


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Vector(msgspec.Struct):
    embedding: bytes | list[float]  # base64 in JSON
    index: int | None = None


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    usage: _Usage | None = None


class _ScoreUsage(_Usage):
    total_tokens: int | None = None


class _Scored(msgspec.Struct):
    index: int
    score: float


class _Ranked(_Scored):
    score: float = msgspec.field(name="relevance_score")


class _Score(msgspec.Struct):
    data: list[_Scored]
    usage: _ScoreUsage | None = None


class _Rerank(msgspec.Struct, rename={"data": "results"}):
    data: list[_Ranked]
    usage: _ScoreUsage | None = None


_read_vectors = msgspec.json.Decoder(_Vectors).decode
_READ: Mapping[str, Callable[[bytes], _Score | _Rerank]] = {
    "rerank": msgspec.json.Decoder(_Rerank, strict=False).decode,
    "score": msgspec.json.Decoder(_Score, strict=False).decode,
}


def embed_body(part: EmbeddingsRequest) -> bytes:
    """The request's body. It asks for base64, a third of the size of JSON numbers."""
    given = {"dimensions": part.dimensions, "truncate_prompt_tokens": part.truncate_to, "user": part.user}
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    talks = [one.messages for one in part.inputs if isinstance(one, Conversation)]
    if talks:
        asked["messages"] = talks if len(talks) > 1 else talks[0]
    else:
        asked["input"] = part.inputs
    return orjson.dumps({"model": part.model, "encoding_format": "base64", **asked})


def vectors_of(part: EmbeddingsRequest, data: bytes) -> EmbeddingsAnswer:
    """The vectors of an answer; the tokens are estimated if the worker reports none or 0. Raises BadHttp."""
    try:
        answer = _read_vectors(data)
        vectors = {
            place if one.index is None else one.index: _numbers(one.embedding)
            for place, one in enumerate(answer.data)
        }
        lengths = {_usable_bytes(one) for one in vectors.values()}
    except ValueError:
        raise BadHttp("its embeddings are not OpenAI's") from None
    ordered = _ordered(vectors, len(answer.data), len(part.inputs), "embeddings for {} inputs")
    if len(lengths) != 1 or 0 in lengths:
        raise BadHttp("its embeddings are empty, not finite or of several lengths")
    reported = None if answer.usage is None else plausible(answer.usage.prompt_tokens)
    return EmbeddingsAnswer(
        part.model,
        [b2a_base64(one, newline=False).decode() for one in ordered],
        reported or part.tokens,
    )


def _numbers(vector: bytes | list[float]) -> bytes:
    """A vector as 32-bit floats; servers that do not know ``encoding_format`` send JSON numbers."""
    return vector if isinstance(vector, bytes) else array("f", vector).tobytes()


def _usable_bytes(vector: bytes) -> int:
    """The length of a vector, bytes; 0 if a number is not finite. Raises ValueError: its end is cut off.

    This runs on the loop for every vector. A number that is not finite has 0x7f or 0xff as its top byte, as
    only the largest finite numbers have, so the numbers themselves are examined only if there is such a byte.
    """
    tops = vector[3::4]
    if b"\x7f" not in tops and b"\xff" not in tops and len(vector) % 4 == 0:
        return len(vector)
    return len(vector) if isfinite(sum(array("f", vector))) else 0


def score_body(part: ScoreRequest) -> bytes:
    """The request's body: it asks for the scores of all documents, without their texts."""
    firsts, texts = [one for one, _ in part.pairs], [one for _, one in part.pairs]
    if part.endpoint == "rerank":
        body = {"query": firsts[0], "documents": texts, "top_n": len(texts), "return_documents": False}
    else:
        # A list would make the worker compute the text again for each document.
        body = {"text_1": firsts[0] if len(set(firsts)) == 1 else firsts, "text_2": texts}
    return orjson.dumps({"model": part.model, **body, **part.options})


def scores_of(part: ScoreRequest, data: bytes) -> ScoreAnswer:
    """The scores of an answer. Raises BadHttp."""
    try:
        answer = _READ[part.endpoint](data)
    except ValueError:
        raise BadHttp("its scores cannot be read") from None
    scores = {one.index: one.score for one in answer.data}
    ordered = _ordered(scores, len(answer.data), len(part.pairs), "scores for {} texts")
    if not all(map(isfinite, ordered)):
        raise BadHttp("one of its scores is not finite")
    usage = answer.usage or _ScoreUsage()
    counted = plausible(usage.prompt_tokens) or plausible(usage.total_tokens)
    return ScoreAnswer(part.model, ordered, counted or part.tokens)


def _ordered(found: Mapping[int, T], given: int, asked: int, what: str) -> tuple[T, ...]:
    """What was ``found``, by its index, in order. Raises BadHttp if it is not one for each that was asked."""
    if given != asked or found.keys() != set(range(asked)):
        raise BadHttp(f"it gave {given} {what.format(asked)}, or one of them twice")
    return tuple([found[index] for index in range(asked)])
