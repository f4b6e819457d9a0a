"""Bodies and answers of rerank, as in Cohere's, Jina's and vLLM's APIs, and of vLLM's scores."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NotRequired

import orjson
from msgspec import structs
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from gateway.contracts.embeddings import PooledAnswer, PooledRequest
from gateway.contracts.fields import (
    ANYTHING,
    Body,
    Either,
    Label,
    Listed,
    Neutral,
    OptionalLabel,
    Text,
    no_null,
)
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import not_allowed, required

MAX_DOCUMENTS: Final = 2_048  # most documents of one request; Cohere has 1,000, and advises fewer
CONTRACT: Final = "rerank"
_PASSED: Final = {"max_tokens_per_doc", "max_tokens_per_query", "truncate_prompt_tokens", "instruction"}
TokenLimit = Annotated[int, Field(ge=0, le=1 << 24), AfterValidator(lambda given: given or None)]
"""0 is vLLM's default and no limit."""
ScoredText = Annotated[str, Field(min_length=1), AfterValidator(no_null)]
ScoredTexts = Either[ScoredText, Annotated[Listed[ScoredText], Field(min_length=1, max_length=MAX_DOCUMENTS)]]


class Document(Body):
    """A document as an object; ``id``, ``title``, ``url`` and ``metadata`` are accepted and ignored."""

    neutral: ClassVar[Neutral] = dict.fromkeys(("id", "title", "url", "metadata"), (ANYTHING,))
    text: ScoredText


class RerankBody(Body):
    """The body of ``POST /v1/rerank`` and ``/v2/rerank``."""

    neutral: ClassVar[Neutral] = {
        "request_id": (ANYTHING,),
        "priority": (None, 0),
        "rank_fields": (None, ["text"]),
        "max_chunks_per_doc": (None,),
    }
    model: Label
    query: ScoredText
    documents: Annotated[Listed[Either[ScoredText, Document]], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: TokenLimit | None = None
    max_tokens_per_query: TokenLimit | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=1 << 24)] | None = None
    instruction: Text | None = None
    user: OptionalLabel = None


class ScoreBody(Body):
    """The body of ``POST /v1/score``: two texts or lists; one ``text_1`` is paired with each ``text_2``.

    Each of the two has further names, as in vLLM.
    """

    neutral: ClassVar[Neutral] = {"request_id": (ANYTHING,), "priority": (None, 0)}
    model: Label
    text_1: ScoredTexts | None = None
    queries: ScoredTexts | None = None
    text_2: ScoredTexts | None = None
    documents: ScoredTexts | None = None
    items: ScoredTexts | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=1 << 24)] | None = None
    instruction: Text | None = None
    user: OptionalLabel = None


class RankedBody(TypedDict):
    """A document's score; ``index`` is its position in the request."""

    index: int
    relevance_score: float
    document: NotRequired[dict[str, Any]]


class RerankAnswerBody(TypedDict):
    """The documents, most relevant first; ``meta`` is Cohere's field, ``usage`` is Jina's and vLLM's."""

    id: str
    model: str
    results: list[RankedBody]
    usage: dict[str, int]
    meta: dict[str, Any]


class ScoredBody(TypedDict):
    """One pair's score."""

    object: str
    index: int
    score: float


class ScoreAnswerBody(TypedDict):
    """The scores, in the order of the pairs."""

    id: str
    object: str
    created: int
    model: str
    data: list[ScoredBody]
    usage: dict[str, int]


Pair = tuple[str, str]


class ScoreRequest(PooledRequest, frozen=True, kw_only=True):
    """A request for the scores of pairs of texts.

    Args:
        endpoint: the worker's endpoint that is called; for ``rerank`` all pairs have the same first text.
        options: the body's optional fields that are sent to the worker.
        names: the body's fields with the first and the second texts.
    """

    pairs: tuple[Pair, ...]
    endpoint: Literal["rerank", "score"]
    options: Mapping[str, Any]
    names: tuple[str, str] = ("text_1", "text_2")


ScoreAnswer = PooledAnswer[float]  # a score for each pair


def rerank_request(body: RerankBody, origin: RequestOrigin) -> ScoreRequest:
    """Convert a validated body to a request. Raises InvalidRequest."""
    pairs = [(body.query, one if isinstance(one, str) else one.text) for one in body.documents]
    return _request(body, origin, "rerank", pairs)


def score_request(body: ScoreBody, origin: RequestOrigin) -> ScoreRequest:
    """Convert a validated body to a request. Raises InvalidRequest."""
    first, firsts = _texts(body, "text_1", "queries")
    second, texts = _texts(body, "text_2", "documents", "items")
    if len(firsts) not in (1, len(texts)):
        raise not_allowed(
            first,
            f"has {len(firsts)} texts and {second} has {len(texts)}",
            f"one text, or as many as {second}",
        )
    if len(firsts) == 1:
        firsts = firsts * len(texts)
    pairs = list(zip(firsts, texts, strict=True))
    asked = _request(body, origin, "score", pairs)
    return structs.replace(asked, names=(first, second))


def _texts(body: ScoreBody, *names: str) -> tuple[str, list[str]]:
    name, *more = [one for one in names if getattr(body, one) is not None] or names[:1]
    if more:
        raise not_allowed(more[0], f"is given with {name}", "one of the two")
    texts = required(getattr(body, name), name)
    return name, [texts] if isinstance(texts, str) else texts


def _request(
    body: RerankBody | ScoreBody,
    origin: RequestOrigin,
    endpoint: Literal["rerank", "score"],
    pairs: Sequence[Pair],
) -> ScoreRequest:
    return ScoreRequest(
        **structs.asdict(origin),
        model=body.model,
        user=body.user,
        pairs=tuple(pairs),
        endpoint=endpoint,
        options=body.model_dump(include=_PASSED, exclude_none=True),
    )


def rerank_body(body: RerankBody, request: ScoreRequest, answer: ScoreAnswer, *, documents: bool) -> bytes:
    """The JSON body; ``documents``: whether it contains the texts, unless the request sets that itself."""
    shown = documents if body.return_documents is None else body.return_documents
    order = sorted(range(len(answer.results)), key=lambda index: (-answer.results[index], index))
    results = []
    for index in order[: body.top_n or None]:
        ranked: dict[str, Any] = {"index": index, "relevance_score": answer.results[index]}
        if shown:
            ranked["document"] = {"text": request.pairs[index][1]}
        results.append(ranked)
    usage = {"prompt_tokens": answer.input_tokens, "total_tokens": answer.input_tokens}
    meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": answer.input_tokens}}
    return orjson.dumps(
        {
            "id": f"rerank-{request.generation_id}",
            "model": answer.model,
            "results": results,
            "usage": usage,
            "meta": meta,
        }
    )


def score_body(request: ScoreRequest, answer: ScoreAnswer) -> bytes:
    data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(answer.results)]
    usage = {"prompt_tokens": answer.input_tokens, "total_tokens": answer.input_tokens}
    return orjson.dumps(
        {
            "id": f"score-{request.generation_id}",
            "object": "list",
            "created": request.created,
            "model": answer.model,
            "data": data,
            "usage": usage,
        }
    )
