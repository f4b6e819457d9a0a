"""One call of a worker's ``/rerank`` or ``/score``."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Final

import msgspec
import orjson

from gateway.backends.port import ScorePart, Scores
from gateway.backends.workers.errors import BadHttp


class _Scored(msgspec.Struct):
    index: int
    score: float


class _Ranked(_Scored):
    score: float = msgspec.field(name="relevance_score")


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    total_tokens: int | None = None


class _Score(msgspec.Struct):
    data: list[_Scored]
    usage: _Usage | None = None


class _Rerank(msgspec.Struct, rename={"data": "results"}):
    data: list[_Ranked]
    usage: _Usage | None = None


_READ: Mapping[str, Callable[[bytes], _Score | _Rerank]] = {
    "rerank": msgspec.json.Decoder(_Rerank, strict=False).decode,
    "score": msgspec.json.Decoder(_Score, strict=False).decode,
}
PATHS: Final = {"rerank": "/rerank", "score": "/score"}


def score_request_body(model: str, part: ScorePart) -> bytes:
    """The request's body: it asks for the scores of all documents, without their texts."""
    firsts, texts = [one for one, _ in part.pairs], [one for _, one in part.pairs]
    if part.endpoint == "rerank":
        body = {"query": firsts[0], "documents": texts, "top_n": len(texts), "return_documents": False}
    else:
        body = {"text_1": firsts, "text_2": texts}
    return orjson.dumps({"model": model, **body, **part.options})


def scores_of(part: ScorePart, data: bytes) -> Scores:
    """The scores of an answer. Raises BadHttp."""
    try:
        answer = _READ[part.endpoint](data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadHttp("its scores cannot be read") from None
    scores = {one.index: one.score for one in answer.data}
    if len(answer.data) != len(part.pairs) or scores.keys() != set(range(len(part.pairs))):
        raise BadHttp(f"it gave {len(answer.data)} scores for {len(part.pairs)} texts, or one of them twice")
    if not all(map(isfinite, scores.values())):
        raise BadHttp("one of its scores is not finite")
    usage = answer.usage or _Usage()
    used = usage.total_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    return Scores(
        tuple([scores[index] for index in range(len(part.pairs))]), part.tokens if used is None else used
    )
