"""OpenAI's files and batches over HTTP."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from accounting.account import HeldRows
from accounting.batch_tables import BatchLine, BatchRow
from accounting.batches import BatchStore
from accounting.keys import KeyLimits
from accounting.stored_responses import ResponseStore
from gateway.batches.batches import Batches
from gateway.batches.files import Files
from gateway.batches.storage import LocalFiles
from gateway.config.batches import BatchesSection
from gateway.config.settings import ServerConfig
from gateway.contracts.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from gateway.contracts.values import Caller, GenerateRequest
from gateway.errors import PublicError
from gateway.generation.sink import Sink
from gateway.http.batch_lines import BatchLines
from gateway.requests.body_memory import BodyMemory
from gateway.requests.in_flight import InFlightRequests
from gateway.requests.stored_responses import StoredResponses, response_of
from gateway.testing import ADMIN_KEY, FakeEmbeddings, FakeJourney, FakeKeys, fake_services
from tests.http.conftest import Connect

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "demo"}}\n'
OTHER = {"authorization": f"Bearer {ADMIN_KEY}"}
"""Headers with a key of another tenant: the operators'."""


@pytest.fixture
def serving(connect: Connect, tmp_path: Path) -> Any:
    """A factory of clients of a gateway with files and batches."""

    @asynccontextmanager
    async def served(uploads: BodyMemory | None = None, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
        section = BatchesSection(folder=str(tmp_path / "files"), **changes)
        store = BatchStore(f"sqlite+aiosqlite:///{tmp_path}/state.db", "a")
        files = Files(store, LocalFiles(tmp_path / "files"), section, lambda: 1_800_000_000.0)
        services = fake_services(files=files, batches=Batches(files))
        if uploads is not None:
            services = replace(services, uploads=uploads)
        async with connect(services) as client:
            yield client
        await store.close()

    return served


async def uploaded(client: httpx.AsyncClient, content: bytes = LINE, **fields: Any) -> httpx.Response:
    form = {"purpose": "batch", **fields}
    return await client.post("/v1/files", files={"file": ("in.jsonl", content)}, data=form)


def fault(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["sluice_code"], error["param"]


async def test_a_file_is_stored_shown_and_deleted(serving: Any) -> None:
    async with serving() as client:
        made = await uploaded(client)
        file = made.json()
        assert made.status_code == 200 and file["id"].startswith("file-")
        assert (file["bytes"], file["filename"], file["purpose"]) == (len(LINE), "in.jsonl", "batch")
        assert file["expires_at"] == 1_800_000_000 + 30 * 86_400
        assert (await client.get(f"/v1/files/{file['id']}")).json() == file
        content = await client.get(f"/v1/files/{file['id']}/content")
        assert content.content == LINE and content.headers["content-length"] == str(len(LINE))
        gone = await client.delete(f"/v1/files/{file['id']}")
        assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
        assert fault(await client.get(f"/v1/files/{file['id']}")) == (404, "not_found", "file_id")


async def test_a_files_content_has_each_header_once(serving: Any) -> None:
    async with serving() as client:
        file = (await uploaded(client)).json()
        headers = (await client.get(f"/v1/files/{file['id']}/content")).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert len(headers.multi_items()) == len(headers)


async def test_a_content_that_is_gone_or_cannot_be_read_is_an_error_not_a_broken_answer(
    serving: Any, tmp_path: Path
) -> None:
    async with serving() as client:
        gone, unreadable, empty = [(await uploaded(client, text)).json()["id"] for text in (LINE, LINE, b"")]
        path = {one.name: one for one in (tmp_path / "files").glob("*/*")}
        path[gone].unlink()
        path[unreadable].unlink()
        path[unreadable].mkdir()
        answers = [await client.get(f"/v1/files/{one}/content") for one in (gone, unreadable, empty)]
    assert [fault(one)[:2] for one in answers[:2]] == [(404, "not_found"), (503, "backend_unavailable")]
    assert (answers[2].status_code, answers[2].content) == (200, b"")


async def test_a_null_character_reaches_no_database(serving: Any) -> None:
    """PostgreSQL refuses one in any text; the request then looked like an outage of the database."""
    form = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a\0b"\r\n\r\nx\r\n'
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    )
    async with serving() as client:
        for path in ("files/%00", "files/%00/content", "batches/a%00", "responses/%00"):
            assert fault(await client.get(f"/v1/{path}")) == (404, "not_found", None)
        for query in ("files?after=%00", "files?purpose=%00", "batches?after=a%00"):
            assert fault(await client.get(f"/v1/{query}"))[:2] == (400, "invalid_request")
        headers = {"content-type": "multipart/form-data; boundary=b"}
        stored = await client.post("/v1/files", content=form, headers=headers)
        assert stored.json()["filename"] == "a\ufffdb"
        reference = {"type": "item_reference", "id": "msg_\0_0"}
        asked = await client.post("/v1/responses", json={"model": "demo", "input": [reference]})
        assert fault(asked) == (404, "not_found", "input.0.id")


@pytest.mark.parametrize("kind", ["files", "batches", "responses"])
async def test_a_refusal_shows_the_beginning_of_a_long_id_alone(serving: Any, kind: str) -> None:
    async with serving() as client:
        refused = await client.get(f"/v1/{kind}/{'x' * 3_000}")
    assert fault(refused)[:2] == (404, "not_found") and len(refused.content) < 500


async def test_files_come_in_pages(serving: Any) -> None:
    async with serving() as client:
        ids = [(await uploaded(client)).json()["id"] for _ in range(5)]
        await uploaded(client, purpose="evals")
        seen: list[str] = []
        asked: dict[str, Any] = {"limit": 2, "order": "asc", "purpose": "batch"}
        while True:
            page = (await client.get("/v1/files", params=asked)).json()
            seen += [one["id"] for one in page["data"]]
            if not page["has_more"]:
                break
            asked["after"] = page["last_id"]
        assert sorted(seen) == sorted(ids)
        newest = (await client.get("/v1/files")).json()
        assert len(newest["data"]) == 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "9"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        ({"expires_after": "3600"}, "expires_after"),
        ({"purpose": ["batch", "evals"]}, "purpose"),
    ],
)
async def test_a_wrong_field_of_the_form_is_named(serving: Any, fields: dict[str, Any], param: str) -> None:
    async with serving() as client:
        assert fault(await uploaded(client, **fields)) == (400, "invalid_request", param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"purpose": "fine-tune"}, "purpose is 'fine-tune'; allowed: batch, user_data, evals"),
        ({"purpose": []}, "purpose is missing; allowed: batch, user_data, evals"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "9"},
            "expires_after[seconds] is '9'; allowed: 3600 to 2592000",
        ),
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor] is missing; allowed: created_at"),
    ],
    ids=["wrong", "absent", "out of range", "half"],
)
async def test_a_wrong_field_of_the_form_is_shown_with_what_is_allowed(
    serving: Any, fields: dict[str, Any], message: str
) -> None:
    async with serving() as client:
        answer = await uploaded(client, **fields)
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize("after", ["000003600001", "000003600" + "9" * 400])
async def test_leading_zeros_do_not_extend_the_life_of_a_file(serving: Any, after: str) -> None:
    """A file that never expired made each later list of the tenant's files an internal error."""
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": after}
    async with serving() as client:
        assert fault(await uploaded(client, **fields)) == (400, "invalid_request", "expires_after[seconds]")
        assert (await client.get("/v1/files")).json()["data"] == []


async def test_what_is_no_form_or_has_no_file_is_refused(serving: Any) -> None:
    async with serving() as client:
        other = await client.post("/v1/files", json={"purpose": "batch"})
        assert fault(other) == (415, "invalid_request", "content-type")
        text = await client.post("/v1/files", data={"purpose": "batch", "file": "text"}, files={"x": b""})
        assert fault(text) == (400, "invalid_request", "file")


async def test_a_form_that_cannot_be_read_is_not_called_a_fault_of_its_file(serving: Any) -> None:
    async with serving() as client:
        headers = {"content-type": "multipart/form-data"}
        many = {f"field{number}": "x" for number in range(20)}
        for param, sent in (
            (None, await client.post("/v1/files", content=b"--x\r\nbroken", headers=headers)),
            ("field16", await client.post("/v1/files", files={"file": b"a"}, data=many)),
            (
                "purpose",
                await client.post("/v1/files", files={"file": b"a"}, data={"purpose": "x" * 66_000}),
            ),
        ):
            assert fault(sent) == (400, "invalid_request", param)


async def test_files_are_bounded_and_take_a_share_of_their_tenant(serving: Any) -> None:
    async with serving(max_file_bytes=2_048, max_tenant_bytes=3_000) as client:
        assert fault(await uploaded(client, b"x" * 70_000)) == (413, "body_too_large", "file")
        assert fault(await uploaded(client, b"x" * 2_100)) == (413, "body_too_large", "file")

        async def unannounced() -> AsyncIterator[bytes]:
            yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
            for _ in range(100):
                yield b"x" * 1_000

        headers = {"content-type": "multipart/form-data; boundary=b"}
        sent = await client.post("/v1/files", content=unannounced(), headers=headers)
        assert fault(sent) == (413, "body_too_large", "file")
        assert (await uploaded(client, b"x" * 2_000)).status_code == 200
        assert fault(await uploaded(client, b"x" * 2_000)) == (429, "quota_exceeded", None)
        assert (await uploaded(client, b"x" * 900)).status_code == 200


async def test_an_upload_that_the_disk_does_not_take_is_told_to_come_again(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    async with serving() as client:
        refused = await uploaded(client, b"x" * 2_000_000)
    assert fault(refused) == (503, "backend_unavailable", None)
    assert "retry-after" in refused.headers


async def test_uploads_in_progress_take_a_bounded_part_of_the_disk(serving: Any) -> None:
    async with serving(uploads=BodyMemory(8_000)) as client:
        assert (await uploaded(client, b"x" * 3_000)).status_code == 200
        assert fault(await uploaded(client, b"x" * 4_000)) == (429, "rate_limited", None)
        assert (await uploaded(client, b"x" * 3_000)).status_code == 200


async def test_another_tenants_file_and_batch_are_unknown_ones(serving: Any) -> None:
    async with serving() as client:
        file = (await uploaded(client)).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=asked)).json()["id"]
        for method, path in (
            ("GET", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("DELETE", f"/v1/files/{file}"),
            ("GET", f"/v1/batches/{batch}"),
            ("POST", f"/v1/batches/{batch}/cancel"),
        ):
            foreign = await client.request(method, path, headers=OTHER)
            unknown = await client.request(method, path.replace(file, "file-x").replace(batch, "batch_x"))
            assert foreign.status_code == unknown.status_code == 404, path
            message = foreign.json()["error"]["message"].replace(file, "file-x").replace(batch, "batch_x")
            assert message == unknown.json()["error"]["message"]
        assert fault(await client.post("/v1/batches", json=asked, headers=OTHER))[0] == 404
        assert (await client.get("/v1/files", headers=OTHER)).json()["data"] == []
        assert (await client.get("/v1/batches", headers=OTHER)).json()["data"] == []


async def test_a_batch_waits_for_its_file_to_be_checked(serving: Any) -> None:
    async with serving() as client:
        file = (await uploaded(client)).json()["id"]
        asked = {
            "input_file_id": file,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"job": "night"},
        }
        made = (await client.post("/v1/batches", json=asked)).json()
        assert (made["status"], made["metadata"]) == ("validating", {"job": "night"})
        assert made["expires_at"] - made["created_at"] == 86_400
        assert (await client.get(f"/v1/batches/{made['id']}")).json() == made
        more = [(await client.post("/v1/batches", json=asked)).json()["id"] for _ in range(2)]
        page = (await client.get("/v1/batches", params={"limit": 2})).json()
        rest = (await client.get("/v1/batches", params={"limit": 2, "after": page["last_id"]})).json()
        found = [one["id"] for one in (*page["data"], *rest["data"])]
        assert (page["has_more"], rest["has_more"]) == (True, False)
        assert sorted(found) == sorted([made["id"], *more])


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"endpoint": "/v1/messages"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"metadata": {str(number): "x" for number in range(17)}}, 400, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            400,
            "output_expires_after.seconds",
        ),
        ({"input_file_id": "file-nowhere"}, 404, "input_file_id"),
    ],
)
async def test_a_wrong_batch_is_refused_by_field(
    serving: Any, changes: dict[str, Any], status: int, param: str
) -> None:
    async with serving() as client:
        file = (await uploaded(client)).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        response = await client.post("/v1/batches", json={**asked, **changes})
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_a_file_sent_again_under_its_idempotency_key_is_stored_once(serving: Any) -> None:
    key = {"idempotency-key": "night"}
    large = LINE * 20_000  # so large that the form is spooled to the disk
    async with serving() as client:

        async def sent(content: bytes, purpose: str = "batch") -> Any:
            files = {"file": ("in.jsonl", content)}
            return await client.post("/v1/files", files=files, data={"purpose": purpose}, headers=key)

        first, again = await sent(large), await sent(large)
        others = await sent(large + LINE), await sent(large, "evals")
        [file] = (await client.get("/v1/files")).json()["data"]
        content = await client.get(f"/v1/files/{file['id']}/content")
    assert first.json() == again.json() == file and content.content == large
    assert again.headers["x-idempotent-replay"] == "true" and "x-idempotent-replay" not in first.headers
    assert [fault(other)[:2] for other in others] == [(409, "idempotency_conflict")] * 2


async def test_a_batch_sent_again_under_its_idempotency_key_is_one_batch(serving: Any) -> None:
    key = {"idempotency-key": "night"}
    async with serving() as client:
        file = (await uploaded(client)).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        sent = [client.post("/v1/batches", json=asked, headers=key) for _ in range(3)]
        answers = [*await asyncio.gather(*sent), await client.post("/v1/batches", json=asked, headers=key)]
        other = await client.post("/v1/batches", json={**asked, "completion_window": "48h"}, headers=key)
        [batch] = (await client.get("/v1/batches")).json()["data"]
    assert {one.content for one in answers} == {answers[0].content} and answers[0].json() == batch
    assert [one.headers.get("x-idempotent-replay") for one in answers].count("true") == 3
    assert fault(other)[:2] == (409, "idempotency_conflict")


async def test_a_batch_that_was_refused_is_made_when_it_is_sent_again(serving: Any) -> None:
    key = {"idempotency-key": "night"}
    async with serving() as client:
        asked = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}
        assert fault(await client.post("/v1/batches", json=asked, headers=key))[0] == 404
        asked["input_file_id"] = (await uploaded(client)).json()["id"]
        made = await client.post("/v1/batches", json=asked, headers=key)
        assert made.status_code == 200 and "x-idempotent-replay" not in made.headers


async def test_a_gateway_without_files_says_so(connect: Connect) -> None:
    async with connect(fake_services()) as client:
        for sent in (await uploaded(client), await client.get("/v1/files"), await client.get("/v1/batches")):
            assert sent.status_code == 400 and "batches.enabled" in json.dumps(sent.json())


async def test_lines_with_equal_labels_run_at_the_same_time() -> None:
    in_flight, journey = InFlightRequests(), FakeJourney(holds=True)

    class Unique(FakeJourney):
        """Receives a request as the journey does."""

        async def run(self, request: GenerateRequest, sink: Sink, accept: Any = None) -> None:
            with in_flight.receive(request):
                await journey.run(request, sink)

    lines = BatchLines(fake_services(Unique()), HeldRows(), lambda: False)
    batch = BatchRow("batch_1", "acme", "key_1", None, "/v1/generate", "f", "in_progress", 0, 1, b"")
    body = b'{"request_id": "mine", "messages": [{"role": "user", "content": "hi"}]}'
    async with asyncio.TaskGroup() as group, asyncio.timeout(60):
        ran = [
            group.create_task(lines.run(batch, BatchLine("batch_1", n, n, str(n), 0, 1), body))
            for n in (1, 2)
        ]
        while not (journey.arrived(2) or any(one.done() for one in ran)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        journey.resume()
    assert [one.result().status for one in ran] == [200, 200]
    assert json.loads(ran[0].result().body)["request_id"] == "mine"


async def test_a_lines_row_has_its_own_id_whatever_its_body_calls_it_and_a_deadline_in_the_body_is_none() -> (
    None
):
    asked: list[GenerateRequest] = []

    class Seen(FakeJourney):
        async def run(self, request: GenerateRequest, sink: Sink, accept: Any = None) -> None:
            asked.append(request)
            await super().run(request, sink)

    services = fake_services(Seen())
    batch = BatchRow("batch_1", "acme", "key_1", None, "/v1/generate", "f", "in_progress", 0, 1, b"")
    body = b'{"request_id": "mine", "deadline_ms": 1, "messages": [{"role": "user", "content": "hi"}]}'
    lines = BatchLines(services, HeldRows(), lambda: False)
    assert (await lines.run(batch, BatchLine("batch_1", 0, 7, "a", 0, 1), body)).status == 200
    assert (asked[0].generation_id, asked[0].request_id) == ("gen_1_7", "mine")
    timeout_s = services.limits.request_timeout_seconds
    assert asked[0].deadline == pytest.approx(asked[0].arrived_at + timeout_s, abs=60)


class OneAMinute(FakeKeys):
    """Keys with a limit of one request per minute."""

    def by_id(self, key_id: str) -> Caller:
        return replace(super().by_id(key_id), limits=KeyLimits(requests_per_minute=1))


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_line_counts_as_a_request_of_its_key_and_waits_beyond_the_limit(endpoint: str) -> None:
    lines = BatchLines(fake_services(keys=OneAMinute()), HeldRows(), lambda: False)
    batch = BatchRow("batch_1", "acme", "key_1", None, endpoint, "f", "in_progress", 0, 1, b"")
    body = b'{"model": "demo", "input": "hi"}'
    if endpoint == "/v1/chat/completions":
        body = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}]}'
    outcomes = [await lines.run(batch, BatchLine("batch_1", n, n, "a", 0, 1), body) for n in (1, 2)]
    assert [one.status for one in outcomes] == [200, 429]
    assert outcomes[1].retry_s is not None and outcomes[1].retry_s > 1


async def test_a_line_of_vectors_takes_no_longer_than_a_request() -> None:
    class Stuck(FakeEmbeddings):
        async def run(self, request: EmbeddingsRequest) -> EmbeddingsAnswer:
            await asyncio.Event().wait()
            raise AssertionError

    services = fake_services(embeddings=Stuck(), limits=ServerConfig(request_timeout_seconds=0.05))
    batch = BatchRow("batch_1", "acme", "key_1", None, "/v1/embeddings", "f", "in_progress", 0, 1, b"")
    lines = BatchLines(services, HeldRows(), lambda: False)
    async with asyncio.timeout(60):
        outcome = await lines.run(batch, BatchLine("batch_1", 0, 1, "a", 0, 1), b'{"model":"e","input":"hi"}')
    assert (outcome.status, outcome.failed_here) == (504, True)


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/responses", "/v1/embeddings"])
async def test_a_lines_body_may_be_as_large_as_a_requests(endpoint: str) -> None:
    chat = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}]}'
    body = chat if endpoint == "/v1/chat/completions" else b'{"model": "demo", "input": "hi"}'
    limits = ServerConfig(max_body_bytes=1024)
    lines = BatchLines(fake_services(limits=limits), HeldRows(), lambda: False)
    batch = BatchRow("batch_1", "acme", "key_1", None, endpoint, "f", "in_progress", 0, 1, b"")
    assert lines.fault(batch, body.replace(b"hi", b"h" * (1024 + 2 - len(body)), 1)) is None
    refused = lines.fault(batch, body.replace(b"hi", b"h" * (1024 + 3 - len(body)), 1))
    assert refused is not None and refused.code == "body_too_large" and "1024" in refused.message


async def test_a_response_of_a_line_is_that_of_the_run_whose_result_counts(tmp_path: Path) -> None:
    """A gateway that lost its claim of the line stores nothing, whether it ends before the other one or after."""
    url, now = f"sqlite+aiosqlite:///{tmp_path}/state.db", 1_800_000_000.0
    store, late = ResponseStore(url, tenant_bytes=1 << 20), BatchStore(url, "late", lambda: now)
    winner = BatchStore(url, "winner", lambda: now)
    stored = StoredResponses(store, unix_time=lambda: now)
    batch = BatchRow("batch_1", "acme", "key_1", None, "/v1/responses", "f", "in_progress", now, now + 1, b"")
    body = b'{"model": "demo", "input": "hi"}'
    await winner.add(batch)
    await winner.set_lines("batch_1", [BatchLine("batch_1", n, n + 1, "a", 0, 1) for n in range(2)])
    assert len(await late.claim_lines("batch_1", now, now + 1, 2)) == 2
    lines = await winner.claim_lines("batch_1", now + 2, now + 20, 2)
    for line, order in zip(lines, ((late, winner), (winner, late)), strict=True):
        for one in order:
            services = fake_services(FakeJourney(pieces=(one._owner,)), responses=stored)
            outcome = await BatchLines(services, HeldRows(), lambda: False).run(batch, line, body)
            counts = await one.finish(line, "done", outcome.body, None, outcome.response)
            assert counts is (one is winner)
        answer = response_of(await stored.get("acme", json.loads(outcome.body)["id"]))
        assert answer["output"][0]["content"][0]["text"] == "winner"
        assert (answer["store"], answer["sluice"]["warnings"]) == (True, [])
    for one in (store, late, winner):
        await one.close()


@pytest.mark.parametrize(("retry_after_ms", "retry_s"), [(None, None), (5_000, 5.0)])
async def test_a_line_over_its_keys_whole_limit_fails_and_one_over_what_is_left_of_it_waits(
    retry_after_ms: int | None, retry_s: float | None
) -> None:
    error = PublicError(429, "rate_limited", "tokens_per_minute: …", retry_after_ms=retry_after_ms)
    lines = BatchLines(fake_services(FakeJourney(error=error)), HeldRows(), lambda: False)
    batch = BatchRow("batch_1", "acme", "key_1", None, "/v1/chat/completions", "f", "in_progress", 0, 1, b"")
    body = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}]}'
    outcome = await lines.run(batch, BatchLine("batch_1", 0, 1, "a", 0, 1), body)
    assert (outcome.status, outcome.retry_s, outcome.failed_here) == (429, retry_s, False)
    assert outcome.reason == error.message
