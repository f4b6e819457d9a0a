"""Rerank and scores through a real gateway."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.integration.test_embeddings import billed, serving
from tests.workers.score_worker import MODEL, SCORES, ScoreWorker, score_of, tokens_of


async def test_documents_are_ranked_over_workers_and_billed_once_though_one_is_killed(tmp_path: Path) -> None:
    workers = ScoreWorker(), ScoreWorker(dies_after=2)
    texts = [f"line {number} of the {'sea' if number % 7 == 0 else 'book'}" for number in range(400)]
    query = "the sea at night"
    async with (
        serving(tmp_path, *workers, model=MODEL) as live,
        httpx.AsyncClient(base_url=live.url, headers=live.headers, timeout=300) as client,
    ):
        asked = {"model": MODEL, "query": query, "documents": texts}
        ranked = (await client.post("/v1/rerank", json=asked)).raise_for_status().json()
        expected = sorted(range(len(texts)), key=lambda index: (-score_of(query, texts[index]), index))
        assert [one["index"] for one in ranked["results"]] == expected
        assert [one["document"]["text"] for one in ranked["results"]] == [texts[index] for index in expected]
        count = len(texts) * tokens_of(query) + tokens_of(*texts)
        assert ranked["usage"]["total_tokens"] == count
        best = (await client.post("/v2/rerank", json={**asked, "top_n": 3})).json()
        assert [one["index"] for one in best["results"]] == expected[:3]
        pairs = {"model": MODEL, "text_1": ["a", "b"], "text_2": ["ab", "abc"]}
        scored = (await client.post("/v1/score", json=pairs)).json()
        assert [one["score"] for one in scored["data"]] == [score_of("a", "ab"), score_of("b", "abc")]
        rows = await billed(live, 3)
        assert [row[:4] for row in rows[:2]] == [("rerank", "stop", count, count)] * 2
        unknown = await client.post("/v1/rerank", json={**asked, "model": "other"})
        assert unknown.status_code == 404 and MODEL in unknown.json()["error"]["message"]


async def test_a_gateway_whose_workers_only_score_is_healthy_and_stays_ready(tmp_path: Path) -> None:
    worker = ScoreWorker()
    worker.posts = SCORES
    async with (
        serving(tmp_path, worker, model=MODEL) as live,
        httpx.AsyncClient(base_url=live.url, headers=live.headers, timeout=60) as client,
    ):
        deep = await client.get("/health/deep")
        assert (deep.status_code, deep.json()["status"]) == (200, "healthy"), deep.text
        assert not deep.json()["workers"]["vectors"][0]["unusable"]
        assert (await client.get("/ready")).status_code == 200
