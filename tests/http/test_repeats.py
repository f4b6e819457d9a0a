"""``Idempotency-Key`` at the paths that do not generate text: answered and billed once, as generations are."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from gateway.app import create_app
from gateway.contracts.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from gateway.contracts.origin import EdgeRequest
from gateway.contracts.values import Caller
from gateway.errors import UnknownModel
from gateway.state.idempotency_sqlite import SqliteIdempotencyStore
from gateway.testing import OTHER_KEY, FakeEmbeddings, MemoryIdempotency, fake_services
from tests.http.conftest import Connect

ROOT = Path(__file__).parents[2]
KEY = {"idempotency-key": "k1"}
VECTORS = {"model": "m", "input": ["a", "bb"]}
RERANK = {"model": "m", "query": "q", "documents": ["aa", "a"]}
SCORE = {"model": "m", "text_1": "q", "text_2": ["aa", "a"]}
PATHS = [
    ("/v1/embeddings", VECTORS),
    ("/v1/rerank", RERANK),
    ("/v2/rerank", RERANK),
    ("/v1/score", SCORE),
]

RECORDINGS = ("/v1/audio/transcriptions", "/v1/audio/translations")


class HeldEmbeddings(FakeEmbeddings):
    """Computes vectors only after ``go`` is set; sets ``begun`` before."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def run(self, request: EmbeddingsRequest) -> EmbeddingsAnswer:
        self.begun.set()
        await self.go.wait()
        return await super().run(request)


class RefusedEmbeddings(FakeEmbeddings):
    """Refuses every request: no worker makes vectors."""

    async def run(self, request: EmbeddingsRequest) -> EmbeddingsAnswer:
        self.asked.append(request)
        raise UnknownModel("no worker makes vectors", param="model")


def code(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["sluice_code"]


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_the_same_key_and_body_are_computed_once(connect: Connect, path: str, body: Any) -> None:
    workers = FakeEmbeddings()
    async with connect(fake_services(embeddings=workers)) as client:
        first = await client.post(path, json=body, headers=KEY)
        again = await client.post(path, json=body, headers=KEY)
        other = await client.post(path, json={**body, "model": "other"}, headers=KEY)
    assert len(workers.asked) == 1
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["x-idempotent-replay"] == "true"
    assert "x-idempotent-replay" not in first.headers
    assert code(other) == (409, "idempotency_conflict")


@pytest.mark.parametrize("path", RECORDINGS)
async def test_a_recording_sent_again_is_transcribed_once_and_another_one_is_a_conflict(
    connect: Connect, path: str
) -> None:
    workers = FakeEmbeddings()
    form = {"model": "m", "response_format": "text"}
    async with connect(fake_services(embeddings=workers)) as client:

        async def sent(content: bytes, **fields: str) -> Any:
            file = {"file": ("a.mp3", content, "audio/mpeg")}
            return await client.post(path, data={**form, **fields}, files=file, headers=KEY)

        first, again = await sent(b"it was"), await sent(b"it was")
        others = await sent(b"it is"), await sent(b"it was", language="en")
    assert len(workers.asked) == 1
    assert first.request.headers["content-type"] != again.request.headers["content-type"], "the boundary"
    assert again.headers["x-idempotent-replay"] == "true" and "x-idempotent-replay" not in first.headers
    assert (again.text, again.headers["content-type"]) == ("it was\n", "text/plain; charset=utf-8")
    assert [code(other) for other in others] == [(409, "idempotency_conflict")] * 2


async def test_a_streamed_transcript_is_not_kept(connect: Connect) -> None:
    workers = FakeEmbeddings()
    async with connect(fake_services(embeddings=workers)) as client:
        for _ in range(2):
            file = {"file": ("a.mp3", b"it was", "audio/mpeg")}
            form = {"model": "m", "stream": "true"}
            answer = await client.post(RECORDINGS[0], data=form, files=file, headers=KEY)
            assert answer.is_success and "it was" in answer.text
    assert len(workers.asked) == 2


async def test_a_stored_transcript_is_not_given_to_a_key_that_may_no_longer_ask_for_it(
    connect: Connect,
) -> None:
    workers = FakeEmbeddings()
    async with connect(fake_services(embeddings=workers)) as client:
        for usable in (True, False):
            workers.usable = usable
            file = {"file": ("a.mp3", b"it was", "audio/mpeg")}
            answer = await client.post(RECORDINGS[0], data={"model": "m"}, files=file, headers=KEY)
            assert "x-idempotent-replay" not in answer.headers
    assert len(workers.asked) == 2


async def test_one_key_is_not_for_two_paths(connect: Connect) -> None:
    async with connect(fake_services()) as client:
        assert (await client.post("/v1/rerank", json=RERANK, headers=KEY)).is_success
        other = await client.post("/v2/rerank", json=RERANK, headers=KEY)
    assert code(other) == (409, "idempotency_conflict")


async def test_without_a_key_each_request_is_computed(connect: Connect) -> None:
    workers, store = FakeEmbeddings(), MemoryIdempotency()
    async with connect(fake_services(embeddings=workers, idempotency=store)) as client:
        for _ in range(2):
            assert (await client.post("/v1/embeddings", json=VECTORS)).is_success
    assert len(workers.asked) == 2 and store.kept == {}


async def test_another_tenants_key_of_the_same_name_is_another(connect: Connect) -> None:
    workers = FakeEmbeddings()
    async with connect(fake_services(embeddings=workers)) as client:
        await client.post("/v1/embeddings", json=VECTORS, headers=KEY)
        other = {**KEY, "authorization": f"Bearer {OTHER_KEY}"}
        assert (await client.post("/v1/embeddings", json={**VECTORS, "input": "c"}, headers=other)).is_success
    assert len(workers.asked) == 2


async def test_vectors_asked_for_twice_at_once_are_computed_once(connect: Connect) -> None:
    workers = HeldEmbeddings()
    async with connect(fake_services(embeddings=workers)) as client, asyncio.TaskGroup() as group:
        calls = [
            group.create_task(client.post("/v1/embeddings", json=VECTORS, headers=KEY)) for _ in range(3)
        ]
        await workers.begun.wait()
        conflict = await client.post("/v1/embeddings", json={**VECTORS, "input": "c"}, headers=KEY)
        workers.go.set()
    assert code(conflict) == (409, "idempotency_conflict")
    assert len(workers.asked) == 1
    assert sum("x-idempotent-replay" in call.result().headers for call in calls) == 2


async def test_an_error_is_not_kept(connect: Connect) -> None:
    workers = RefusedEmbeddings()
    async with connect(fake_services(embeddings=workers)) as client:
        for _ in range(2):
            refused = await client.post("/v1/embeddings", json=VECTORS, headers=KEY)
            assert refused.status_code == 404 and "x-idempotent-replay" not in refused.headers
    assert len(workers.asked) == 2


async def test_stored_vectors_are_not_given_to_a_key_that_may_no_longer_ask_for_them(
    connect: Connect,
) -> None:
    workers = FakeEmbeddings()
    async with connect(fake_services(embeddings=workers)) as client:
        await client.post("/v1/embeddings", json=VECTORS, headers=KEY)
        workers.usable = False
        refused = await client.post("/v1/embeddings", json=VECTORS, headers=KEY)
    assert "x-idempotent-replay" not in refused.headers
    assert len(workers.asked) == 2, "the journey itself refuses"


async def test_vectors_too_large_for_the_store_are_computed_again(connect: Connect) -> None:
    workers = FakeEmbeddings()
    store = SqliteIdempotencyStore(Path(":memory:"), unix_time=lambda: 1_800_000_000.0)
    large = {"model": "m", "input": ["a"] * 2_048}
    async with connect(fake_services(embeddings=workers, idempotency=store)) as client:
        small = [await client.post("/v1/embeddings", json=VECTORS, headers=KEY) for _ in range(2)]
        assert [len(workers.asked), small[1].headers["x-idempotent-replay"]] == [1, "true"]
        workers.run = wide(workers)  # type: ignore[method-assign]
        for _ in range(2):
            answer = await client.post("/v1/embeddings", json=large, headers={"idempotency-key": "k2"})
            assert answer.is_success and "x-idempotent-replay" not in answer.headers
            assert len(answer.content) > 1 << 20
    assert len(workers.asked) == 3
    await store.close()


def wide(workers: FakeEmbeddings) -> Any:
    async def run(request: EmbeddingsRequest) -> EmbeddingsAnswer:
        workers.asked.append(request)
        return EmbeddingsAnswer(request.model, ["AACAPwAAgD8AAIA/" * 64] * len(request.inputs), 1)

    return run


async def test_a_store_that_cannot_be_read_refuses_vectors_before_they_are_billed(connect: Connect) -> None:
    workers = FakeEmbeddings()
    services = fake_services(embeddings=workers, idempotency=MemoryIdempotency(broken_get=True))
    async with connect(services) as client:
        refused = await client.post("/v1/embeddings", json=VECTORS, headers=KEY)
    assert refused.status_code == 503 and workers.asked == []


async def test_an_idempotency_key_that_is_too_long_is_refused(connect: Connect) -> None:
    async with connect(fake_services()) as client:
        refused = await client.post("/v1/embeddings", json=VECTORS, headers={"idempotency-key": "x" * 256})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_a_replay_is_reported_as_one_and_the_first_request_is_not(connect: Connect) -> None:
    events: list[EdgeRequest] = []
    async with connect(fake_services(emit_edge=events.append)) as client:
        for _ in range(2):
            await client.post("/v1/embeddings", json=VECTORS, headers=KEY)
    assert [one.replayed for one in events] == [True]


async def test_a_request_that_waits_for_an_equal_one_does_not_count_as_concurrent(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = HeldEmbeddings()
    services, taken = fake_services(embeddings=workers), list[Caller]()
    running = services.limiter.running

    def counted(caller: Caller) -> AbstractContextManager[None]:
        taken.append(caller)
        return running(caller)

    monkeypatch.setattr(services.limiter, "running", counted)
    async with connect(services) as client, asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(client.post("/v1/embeddings", json=VECTORS, headers=KEY))
        await workers.begun.wait()
        workers.go.set()
    assert len(taken) == 1


def paths_with_the_header(paths: dict[str, Any]) -> set[str]:
    return {
        path
        for path, operations in paths.items()
        for one in operations.get("post", {}).get("parameters", ())
        if one["name"] == "idempotency-key"
    }


def test_the_manual_lists_every_path_where_the_header_counts() -> None:
    manual = (ROOT / "docs" / "api.md").read_text()
    table = manual.partition("## Repeated requests")[2].partition("## Errors")[0]
    listed = set(re.findall(r"`(?:POST )?(/[a-z0-9_/]+)`", table))
    assert listed == paths_with_the_header(create_app(fake_services()).openapi()["paths"])


def test_the_document_names_the_header_where_it_counts() -> None:
    paths = create_app(fake_services()).openapi()["paths"]
    named = paths_with_the_header(paths)
    assert {*(path for path, _ in PATHS), "/v1/batches", "/v1/files", *RECORDINGS} <= named
    assert "/v1/chat/completions" in named and "/tokenize" not in named
    for path in named:
        assert "409" in paths[path]["post"]["responses"], path
    assert "raw" not in json.dumps([paths[path]["post"].get("parameters") for path, _ in PATHS])
