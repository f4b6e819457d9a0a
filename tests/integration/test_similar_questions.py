"""A real gateway whose response cache answers similar questions when the workers of a route are gone."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.integration.live import LiveGateway, gateway
from tests.integration.test_embeddings import START_TIMEOUT_S, wait_for
from tests.resilience.words_embedder import vector_of
from tests.workers.raw_worker import RawWorker, answers
from tests.workers.vector_worker import MODEL, VectorWorker

LISTED = json.dumps({"data": [{"id": "chat-model", "max_model_len": 4_096}]}).encode()
ROUTE = {
    "backends": [{"name": "chat", "weight": 100}],
    "fallback": ["response_cache", "degraded"],
    "fallback_text_in": ["native", "openai"],
    "response_cache": {"similar": {"model": MODEL, "threshold": 0.6}},
}


def words(text: str, _: int) -> array[float]:
    return array("f", vector_of(text))


async def ask(client: httpx.AsyncClient, text: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "sampling": {"max_tokens": 20}, **more}
    reply = await client.post("/v1/generate", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def until_embedded(live: LiveGateway, rows: int) -> list[tuple[str, str, int, int]]:
    """Wait for ``rows`` rows of the cache in the ledger, and return them."""
    select = "select kind, tenant, input_tokens, billable_input_tokens from generations where kind = 'cache'"
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        found = sqlite3.connect(live.folder / "ledger.db").execute(select).fetchall()
        if len(found) >= rows:
            return found
        assert time.monotonic() < deadline, live.log.read_text()
        await asyncio.sleep(0.05)


async def test_an_outage_is_answered_from_a_similar_question_and_nobody_is_billed_for_its_vectors(
    tmp_path: Path,
) -> None:
    chat, vectors = (
        RawWorker([answers("Kentaro ", "Miura.")], models=partial(bytes, LISTED)),
        VectorWorker(of=words),
    )
    config = {
        "engine": {"kind": "none"},
        "backends": {
            "chat": {"kind": "openai", "base_urls": []},
            "vectors": {"kind": "openai", "base_urls": []},
        },
        "routing": {"file": str(tmp_path / "routing.yaml")},
        "response_cache": {"timeout_ms": 10_000},
    }
    for name, worker in (("chat", chat), ("vectors", vectors)):
        await worker.start()
        config["backends"][name]["base_urls"] = [worker.url]  # type: ignore[index]
    (tmp_path / "routing.yaml").write_text(yaml.safe_dump({"routes": {"self_hosted_generation": ROUTE}}))
    (tmp_path / "sluice.yaml").write_text(yaml.safe_dump(config))
    manager = gateway(tmp_path, config=tmp_path / "sluice.yaml")
    live = await asyncio.to_thread(manager.__enter__)
    try:
        await asyncio.to_thread(wait_for, live, 2)
        async with httpx.AsyncClient(base_url=live.url, headers=live.headers, timeout=60) as client:
            first = await ask(client, "Who created the book Berserk?")
            assert first["output_text"] == "Kentaro Miura."
            await until_embedded(live, 1)
            assert vectors.inputs == ["Who created the book Berserk?"]
            await chat.die()

            deadline = time.monotonic() + START_TIMEOUT_S
            while (found := await ask(client, "Who made the book Berserk?"))["finish_reason"] == "degraded":
                assert time.monotonic() < deadline, live.log.read_text()
                await asyncio.sleep(0.1)
            assert found["output_text"] == first["output_text"]
            assert found["fallback"]["kind"] == "response_cache"
            assert found["warnings"] == ["answered from a similar question (0.80)"]
            openais = await client.post(
                "/v1/chat/completions",
                json={"model": "chat-model", "messages": [{"role": "user", "content": "Who made it?"}]},
            )
            assert openais.json()["choices"][0]["finish_reason"], openais.text
            for text, more in (
                ("Where can I buy it?", {}),
                ("Who made the book Berserk?", {"locale": "ja"}),
                ("Who made the book Berserk 2?", {}),
            ):
                assert (await ask(client, text, **more))["finish_reason"] == "degraded", text
            metrics = (await client.get("/metrics")).text
            assert 'sluice_response_cache_lookups_total{kind="similar"} 1.0' in metrics
            await vectors.die()
            assert (await ask(client, "Who has made the book Berserk?"))["finish_reason"] == "degraded"
            billed = await until_embedded(live, 2)
            assert {row[0] for row in billed} == {"cache"} and not any(row[3] for row in billed)
            assert billed[0][2] == 5 and len({row[1] for row in billed}) == 1
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
        for worker in (chat, vectors):
            await worker.die()
