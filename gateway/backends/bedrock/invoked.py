"""Embeddings and rerank on Bedrock: the requests of InvokeModel, and their answers."""

from array import array
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import attrgetter
from typing import Any, Final

import msgspec
import orjson

from gateway.backends.bedrock.answer import InvokedModel
from gateway.backends.port import plain_inputs
from gateway.contracts.embeddings import EmbeddingsRequest
from gateway.contracts.rerank import ScoreAnswer, ScoreRequest
from resilience.failures import BackendFailure, FailureKind, invalid_input

COHERE_TEXTS: Final = 96
"""Most texts of one call, by Cohere's contract on Bedrock. Titan takes one."""


class _Titan(msgspec.Struct):
    embedding: list[float]
    inputTextTokenCount: int


class _ByType(msgspec.Struct):
    # A field named like the type would hide it from its own annotation since Python 3.14.
    floats: list[list[float]] = msgspec.field(name="float")


class _Cohere(msgspec.Struct):
    embeddings: _ByType


class _Ranked(msgspec.Struct):
    index: int
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_Ranked]


_read_titan = msgspec.json.Decoder(_Titan).decode
_read_cohere = msgspec.json.Decoder(_Cohere).decode
_read_ranking = msgspec.json.Decoder(_Ranking, strict=False).decode


@dataclass(frozen=True, slots=True)
class EmbeddingFamily:
    """How the embedding models of one maker are called.

    Args:
        texts: most texts of a call.
        dimensions: the field for the length of a vector; ``None``: the model has one length.
        truncates: whether the model can cut texts that are too long.
    """

    texts: int
    dimensions: str | None
    truncates: bool
    body: Callable[[Sequence[str], bool], dict[str, Any]]
    read: Callable[[InvokedModel], tuple[list[list[float]], int]]

    def requests(self, part: EmbeddingsRequest) -> Iterator[Mapping[str, Any]]:
        """The calls for a part, in order. Raises BackendFailure: the model cannot do what is asked."""
        model_id, inputs = part.model, plain_inputs(part)
        texts = [one for one in inputs if isinstance(one, str)]
        if len(texts) < len(inputs):
            raise _refused(model_id, "input", "takes texts, no token ids")
        if part.dimensions is not None and self.dimensions is None:
            raise _refused(model_id, "dimensions", "has vectors of one length")
        if part.truncate_to is not None and not (self.truncates and part.truncate_to == -1):
            allowed = "cuts texts at its own length alone (-1)" if self.truncates else "cuts no texts"
            raise _refused(model_id, "truncate_prompt_tokens", allowed)
        for start in range(0, len(texts), self.texts):
            body = self.body(texts[start : start + self.texts], part.truncate_to is not None)
            if part.dimensions is not None and self.dimensions is not None:
                body[self.dimensions] = part.dimensions
            yield _invoke_request(model_id, body)

    def vectors(self, answer: InvokedModel) -> tuple[tuple[str, ...], int]:
        """The vectors as base64 of 32-bit floats, and the tokens. Raises BackendFailure: not readable."""
        try:
            vectors, tokens = self.read(answer)
        except ValueError:
            text = "Bedrock's answer has no embeddings that can be read"
            raise BackendFailure(FailureKind.STREAM_BROKEN, text) from None
        return tuple([b64encode(array("f", one)).decode() for one in vectors]), tokens


def _invoke_request(model_id: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = "application/json"
    return {"modelId": model_id, "contentType": kind, "accept": kind, "body": orjson.dumps(body)}


def family_of(model_id: str) -> EmbeddingFamily | None:
    """How a model makes embeddings; ``None``: it makes none. A profile's id contains the model's id."""
    return next((family for part, family in _FAMILIES if part in model_id), None)


def _refused(model_id: str, param: str, why: str) -> BackendFailure:
    return invalid_input(f"{model_id} {why}; {param} is refused", param)


def _titan_body(texts: Sequence[str], cut: bool) -> dict[str, Any]:
    return {"inputText": texts[0]}


def _titan_answer(answer: InvokedModel) -> tuple[list[list[float]], int]:
    read = _read_titan(answer.body)
    return [read.embedding], read.inputTextTokenCount


def _cohere_body(texts: Sequence[str], cut: bool) -> dict[str, Any]:
    return {
        "texts": texts,
        # OpenAI's contract does not say what a text is for.
        "input_type": "search_document",
        "embedding_types": ["float"],
        "truncate": "END" if cut else "NONE",
    }


def _cohere_answer(answer: InvokedModel) -> tuple[list[list[float]], int]:
    return _read_cohere(answer.body).embeddings.floats, answer.input_tokens


_FAMILIES = (
    ("amazon.titan-embed-text-v2", EmbeddingFamily(1, "dimensions", False, _titan_body, _titan_answer)),
    ("amazon.titan-embed-", EmbeddingFamily(1, None, False, _titan_body, _titan_answer)),
    (
        "cohere.embed-v4",
        EmbeddingFamily(COHERE_TEXTS, "output_dimension", True, _cohere_body, _cohere_answer),
    ),
    ("cohere.embed-", EmbeddingFamily(COHERE_TEXTS, None, True, _cohere_body, _cohere_answer)),
)


def reranks(model_id: str) -> bool:
    """Whether a model scores documents. A profile's id contains the model's id."""
    return any(part in model_id for part in ("cohere.rerank-", "amazon.rerank-"))


def rerank_request(part: ScoreRequest) -> Mapping[str, Any]:
    """The parameters of the call. Raises BackendFailure: the model cannot do what is asked."""
    model_id, queries = part.model, {query for query, _ in part.pairs}
    if len(queries) > 1:
        first, second = part.names
        raise invalid_input(f"{model_id} takes one {first} for all of {second}", first)
    for name in part.options:
        raise invalid_input(f"{model_id} has no {name}", name)
    texts = [text for _, text in part.pairs]
    body: dict[str, Any] = {"query": queries.pop(), "documents": texts, "top_n": len(texts)}
    if "cohere." in model_id:
        body["api_version"] = 2
    return _invoke_request(model_id, body)


def scores_of(answer: InvokedModel, part: ScoreRequest) -> ScoreAnswer:
    """The scores in the order of the texts. Raises BackendFailure: the answer is not readable."""
    try:
        ranked = _read_ranking(answer.body).results
    except ValueError:
        ranked = []
    ranked.sort(key=attrgetter("index"))
    scores = [one.relevance_score for one in ranked]
    if [one.index for one in ranked] != list(range(len(part.pairs))) or not all(map(isfinite, scores)):
        raise BackendFailure(FailureKind.STREAM_BROKEN, "Bedrock's answer has no scores that can be read")
    return ScoreAnswer(part.model, scores, answer.input_tokens or part.tokens)
