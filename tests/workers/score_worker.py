"""A worker whose scores follow from its texts."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from tests.workers.raw_worker import RawWorker, Request

MODEL = "bge-reranker"
SCORES = frozenset({"/v1/rerank", "/v1/score"})


def score_of(query: str, text: str) -> float:
    """The share of the text's letters that occur in the query."""
    return sum(letter in query for letter in text) / len(text)


def tokens_of(*texts: str) -> int:
    return sum(len(text.split()) for text in texts)


class ScoreWorker(RawWorker):
    """Lists one model; answers ``/rerank`` and ``/score`` as vLLM does, the best first.

    ``dies_after``: at this request, counted from 1, the worker is killed without an answer.
    """

    def __init__(self, *, dies_after: int | None = None, model: str = MODEL) -> None:
        listed = json.dumps({"data": [{"id": model, "max_model_len": 512}]}).encode()
        super().__init__([self.answer], models=partial(bytes, listed))
        self.dies_after = dies_after

    async def answer(self, request: Request) -> None:
        if self.dies_after is not None and len(self.requests) >= self.dies_after:
            await self.die()
            return
        if request.path not in SCORES:
            await request.whole(404, b'{"detail": "Not Found"}')
            return
        body: dict[str, Any] = request.body
        ranks = "documents" in body
        texts = body["documents"] if ranks else body["text_2"]
        firsts = body["query"] if ranks else body["text_1"]
        firsts = [firsts] * len(texts) if isinstance(firsts, str) else firsts
        scores = [score_of(first, text) for first, text in zip(firsts, texts, strict=True)]
        count = tokens_of(*firsts, *texts)
        usage = {"prompt_tokens": count, "total_tokens": count}
        order = sorted(range(len(texts)), key=lambda index: -scores[index])
        if ranks:
            results = [
                {"index": index, "relevance_score": scores[index], "document": {"text": ""}}
                for index in order
            ]
            reply = {"id": "x", "model": MODEL, "results": results, "usage": {"total_tokens": count}}
        else:
            data = [{"object": "score", "index": index, "score": scores[index]} for index in order]
            reply = {"id": "x", "object": "list", "data": data, "usage": usage}
        await request.whole(200, json.dumps(reply).encode())
