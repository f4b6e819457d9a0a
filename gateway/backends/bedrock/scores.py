"""Rerank of Cohere and Amazon on Bedrock: the request of InvokeModel, and its answer."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import msgspec

from gateway.backends.bedrock.answer import InvokedModel
from gateway.backends.bedrock.vectors import invoke_request
from gateway.backends.port import ScorePart, Scores
from resilience.failures import BackendFailure, FailureKind

_MODELS = ("cohere.rerank-", "amazon.rerank-")


class _Ranked(msgspec.Struct):
    index: int
    relevance_score: float


class _Answer(msgspec.Struct):
    results: list[_Ranked]


_read = msgspec.json.Decoder(_Answer, strict=False).decode


def reranks(model_id: str) -> bool:
    """Whether a model scores documents. A profile's id contains the model's id."""
    return any(part in model_id for part in _MODELS)


def rerank_request(model_id: str, part: ScorePart) -> Mapping[str, Any]:
    """The parameters of the call. Raises BackendFailure: the model cannot do what is asked."""
    queries = {query for query, _ in part.pairs}
    if len(queries) > 1:
        first, second = part.names
        raise BackendFailure(
            FailureKind.INVALID_INPUT, f"{model_id} takes one {first} for all of {second}", param=first
        )
    for name in part.options:
        raise BackendFailure(FailureKind.INVALID_INPUT, f"{model_id} has no {name}", param=name)
    texts = [text for _, text in part.pairs]
    body: dict[str, Any] = {"query": queries.pop(), "documents": texts, "top_n": len(texts)}
    if "cohere." in model_id:
        body["api_version"] = 2
    return invoke_request(model_id, body)


def scores_of(answer: InvokedModel, part: ScorePart) -> Scores:
    """The scores in the order of the texts. Raises BackendFailure: the answer is not readable."""
    try:
        ranked = _read(answer.body).results
    except (msgspec.DecodeError, UnicodeDecodeError):
        ranked = []
    scores = {one.index: one.relevance_score for one in ranked}
    if scores.keys() != set(range(len(part.pairs))) or not all(map(isfinite, scores.values())):
        raise BackendFailure(FailureKind.STREAM_BROKEN, "Bedrock's answer has no scores that can be read")
    return Scores(
        tuple([scores[index] for index in range(len(part.pairs))]), answer.input_tokens or part.tokens
    )
