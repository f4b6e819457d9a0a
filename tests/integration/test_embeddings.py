"""Embeddings through a real gateway, by the official client."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from array import array
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.integration.live import ADMIN_KEY, LiveGateway, gateway
from tests.workers.raw_worker import RawWorker
from tests.workers.vector_worker import MODEL, SIZE, VectorWorker, tokens_of, vector_of

START_TIMEOUT_S = 120.0


@asynccontextmanager
async def serving(folder: Path, *workers: RawWorker, model: str = MODEL) -> AsyncIterator[LiveGateway]:
    """Run a gateway in front of one pool of these workers; the pool's configuration names no model."""
    for one in workers:
        await one.start()
    pool = {
        "kind": "openai",
        "base_urls": [one.url for one in workers],
        "price": {"input_usd_per_million": 1.0, "output_usd_per_million": 0.0},
    }
    config: dict[str, Any] = {
        "backends": {"vectors": pool},
        "routing": {"file": str(folder / "routing.yaml")},
    }
    config["models"] = {model: {"aliases": ["text-embedding-3-small"]}}
    route = {"backends": [{"name": "vectors", "weight": 100}], "fallback": []}
    (folder / "routing.yaml").write_text(yaml.safe_dump({"routes": {"self_hosted_generation": route}}))
    (folder / "sluice.yaml").write_text(yaml.safe_dump(config))
    manager = gateway(folder, config=folder / "sluice.yaml")
    live = await asyncio.to_thread(manager.__enter__)
    try:
        await asyncio.to_thread(wait_for, live, len(workers))
        yield live
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
        for one in workers:
            await one.die()


def wait_for(live: LiveGateway, workers: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while live.metric("sluice_worker_in_service") < workers:
        assert time.monotonic() < deadline, live.log.read_text()
        time.sleep(0.05)


async def billed(live: LiveGateway, rows: int) -> list[tuple[str, str, int, int, int]]:
    """Wait for ``rows`` rows: contract, finish reason, input tokens, billed ones, cost in nano USD."""
    select = (
        "select contract, finish_reason, input_tokens, billable_input_tokens, cost_nanousd from generations"
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        found = sqlite3.connect(live.folder / "ledger.db").execute(f"{select} order by started_at").fetchall()
        if len(found) >= rows:
            return found
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)


async def test_the_official_client_gets_each_form_bit_for_bit_and_each_request_is_billed_once(
    tmp_path: Path,
) -> None:
    worker = VectorWorker()
    async with (
        serving(tmp_path, worker) as live,
        openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY, max_retries=0) as client,
        httpx.AsyncClient(base_url=live.url, headers=live.headers, timeout=60) as plain,
    ):
        text, ids = "a book about the sea", [3, 1, 4]
        for given, inputs in (
            (text, [text]),
            ([text, "x"], [text, "x"]),
            (ids, [ids]),
            ([ids, [9]], [ids, [9]]),
        ):
            # By default the client asks for base64 and decodes it.
            for form in ({}, {"encoding_format": "float"}):
                made = await client.embeddings.create(model=MODEL, input=given, **form)
                assert [array("f", one.embedding).tobytes() for one in made.data] == [
                    vector_of(one).tobytes() for one in inputs
                ]
                assert [one.index for one in made.data] == list(range(len(inputs)))
                assert made.usage.prompt_tokens == sum(map(tokens_of, inputs))
                assert made.model == MODEL
        short = await client.embeddings.create(model="text-embedding-3-small", input=text, dimensions=4)
        assert len(short.data[0].embedding) == 4 and short.model == MODEL
        raw = await plain.post(
            "/v1/embeddings", json={"model": MODEL, "input": text, "encoding_format": "base64"}
        )
        assert b64decode(raw.json()["data"][0]["embedding"]) == vector_of(text).tobytes()
        assert worker.requests[0].body.keys() == {"model", "input", "encoding_format"}
        rows = await billed(live, 10)
        assert rows[0] == ("embeddings", "stop", 5, 5, 5_000)
        metrics = (await plain.get("/metrics")).text
        assert "sluice_requests_total{" in metrics and 'route="embeddings"' in metrics

        with pytest.raises(openai.NotFoundError) as unknown:
            await client.embeddings.create(model="bge-smal", input=text)
        assert f"known: {MODEL}" in str(unknown.value)
        for body, param in (
            ({"input": []}, "input"),
            ({"input": ["a", ""]}, "input.1"),
            ({"input": ["a", "b", None]}, "input.2"),
            ({"input": ["a"] * 2_049}, "input"),
            ({"input": [[1], []]}, "input.1"),
            ({"input": [-1]}, "input"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
            ({"input": "a", "unheard_of": 1}, "unheard_of"),
        ):
            refused = await plain.post("/v1/embeddings", json={"model": MODEL, **body})
            assert refused.status_code == 400, (body, refused.text)
            assert refused.json()["error"]["param"].startswith(param), refused.text
        asked, key = {"model": MODEL, "input": text}, {"idempotency-key": "once"}
        first, again = [await plain.post("/v1/embeddings", json=asked, headers=key) for _ in range(2)]
        assert again.headers["x-idempotent-replay"] == "true" and again.content == first.content
        await client.embeddings.create(model=MODEL, input=text)
        assert len(await billed(live, 12)) == 12


async def test_a_killed_worker_loses_no_vector_and_doubles_none_on_the_bill(tmp_path: Path) -> None:
    workers = VectorWorker(), VectorWorker(dies_after=3)
    texts = [f"line {number} of the book" for number in range(2_048)]
    async with (
        serving(tmp_path, *workers) as live,
        httpx.AsyncClient(base_url=live.url, headers=live.headers, timeout=300) as client,
    ):
        answer = (await client.post("/v1/embeddings", json={"model": MODEL, "input": texts})).json()
        assert [array("f", one["embedding"]).tobytes() for one in answer["data"]] == [
            vector_of(one).tobytes() for one in texts
        ]
        count = sum(map(tokens_of, texts))
        assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
        assert [row[1:4] for row in await billed(live, 1)] == [("stop", count, count)]
        # What the killed worker has answered, two parts at most, was not asked for again.
        asked = workers[0].inputs
        assert len(workers[1].requests) >= 3 and len(texts) - 2 * 64 <= len(asked) == len(set(asked))
        await workers[0].die()
        gone = await client.post("/v1/embeddings", json={"model": MODEL, "input": texts})
        assert gone.status_code == 503 and gone.json()["error"]["sluice_code"] == "backend_unavailable"
        assert (await billed(live, 2))[1][1:4] == ("error", 0, 0)


async def test_numbers_of_a_worker_become_base64_and_its_refusal_is_passed_on(tmp_path: Path) -> None:
    worker = VectorWorker(numbers=True)
    async with (
        serving(tmp_path, worker) as live,
        httpx.AsyncClient(base_url=live.url, headers=live.headers, timeout=300) as client,
    ):
        asked = {"model": MODEL, "input": ["the sea"], "encoding_format": "base64"}
        made = (await client.post("/v1/embeddings", json=asked)).json()
        assert b64decode(made["data"][0]["embedding"]) == vector_of("the sea").tobytes()
        assert len(b64decode(made["data"][0]["embedding"])) == 4 * SIZE
        refusal = {"error": {"message": "maximum context length is 512 tokens", "code": 400}}

        async def refuse(request: Any) -> None:
            await request.whole(400, json.dumps(refusal).encode())

        worker.behaviours[:] = [refuse]
        long = await client.post("/v1/embeddings", json=asked)
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def own_vectors(live: LiveGateway, **body: Any) -> httpx.Response:
    """The answer of the engine in process to a request for embeddings."""
    return httpx.post(
        f"{live.url}/v1/embeddings", json={"model": "demo", **body}, headers=live.headers, timeout=120
    )


def vectors_in(answer: httpx.Response) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_the_engine_in_process_makes_vectors_in_order_each_the_same_in_any_batch(live: LiveGateway) -> None:
    texts = [f"Who wrote volume {number} of Berserk?" for number in range(150)]
    answer = own_vectors(live, input=texts)
    found = vectors_in(answer)
    assert answer.json()["model"] == "demo"
    cards = httpx.get(f"{live.url}/v1/models", headers=live.headers, timeout=60).json()["data"]
    assert {one["id"]: one["pooling"] for one in cards if one["parent"] is None} == {"demo": "mean"}
    for number in (0, 77, 149):
        alone = own_vectors(live, input=texts[number])
        [vector] = vectors_in(alone)
        assert len(vector) == len(found[number])
        assert cosine(vector, vector) == pytest.approx(1.0, abs=1e-4)
        assert cosine(vector, found[number]) == pytest.approx(1.0, abs=1e-4)
        assert alone.json()["usage"]["prompt_tokens"] > 5
    near = cosine(found[3], found[4])
    [other] = vectors_in(own_vectors(live, input="the sea in winter"))
    assert cosine(found[3], other) < near < 1.0


def test_the_engine_in_process_truncates_when_asked_and_refuses_what_it_cannot(live: LiveGateway) -> None:
    ids = [[one + 5 for one in range(100)]]
    [whole], [cut] = (vectors_in(own_vectors(live, input=one)) for one in (ids, [ids[0][:40]]))
    [asked_to_cut] = vectors_in(own_vectors(live, input=ids, truncate_prompt_tokens=40))
    assert cosine(asked_to_cut, cut) == pytest.approx(1.0, abs=1e-4) != cosine(asked_to_cut, whole)
    long = "a book about the sea " * 4_000
    assert own_vectors(live, input=long, truncate_prompt_tokens=-1).status_code == 200
    refused = own_vectors(live, input=long)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    refused = own_vectors(live, input="a", dimensions=8)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")
    # These are the caller's errors: any number of them leaves the backend in service.
    for _ in range(20):
        refused = own_vectors(live, input=[[10_000_000]])
        assert refused.status_code == 400, refused.text
    assert own_vectors(live, input="a").status_code == 200


def test_the_engine_in_process_names_the_input_at_fault_with_its_number(live: LiveGateway) -> None:
    long = [7] * 5_120
    for given, code, message, param in (
        (
            ["a"] * 70 + [long],
            "context_length_exceeded",
            "This model's maximum context length is exceeded: input.70 has 5,120 tokens; allowed: at most ",
            "input.70",
        ),
        (
            [long],
            "context_length_exceeded",
            "This model's maximum context length is exceeded: input has 5,120 tokens; allowed: at most ",
            "input",
        ),
        (
            [[1], [10_000_000, 2]],
            "invalid_request",
            "input.1 has token id 10000000; allowed: 0 to ",
            "input.1",
        ),
    ):
        ids = [[1] if one == "a" else one for one in given]
        error = own_vectors(live, input=ids).json()["error"]
        assert (error["code"], error["param"]) == (code, param), error
        assert error["message"].startswith(message), error


def test_a_caller_who_leaves_frees_the_engine_in_process(live: LiveGateway) -> None:
    texts = [f"{number} " + "a book about the sea " * 100 for number in range(400)]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{live.url}/v1/embeddings",
            json={"model": "demo", "input": texts},
            headers=live.headers,
            timeout=httpx.Timeout(30, read=0.3),
        )
    live.wait_until_idle()
