"""Ids, keys, bodies and unknown paths: what every path has in common."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import APIRouter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from adapters.errors import UnknownAdapter
from gateway.app import create_app
from gateway.config.settings import ServerConfig
from gateway.contracts.origin import EdgeRequest
from gateway.errors import UnknownRoute
from gateway.http.exchange import usable_request_id
from gateway.http.middleware import EdgeMiddleware
from gateway.testing import CALLER_KEY, FakeJourney, fake_services

BODY = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = {"model": "demo", **BODY}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
POSTED = [
    "/v1/generate",
    "/invocations",
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
]
OPENAI = [*POSTED[2:], "/v1/models", "/v1/embeddings"]


async def test_every_response_carries_both_ids(connect: Any) -> None:
    async with connect(fake_services()) as client:
        for method, path in [("POST", one) for one in POSTED] + [
            ("GET", one) for one in ("/ping", "/ready", "/metrics", "/v1/models", "/nowhere", "/openapi.json")
        ]:
            response = await client.request(method, path, json={})
            assert response.headers["x-request-id"], path
            assert len(response.headers["x-trace-id"]) == 32, path
            assert response.headers.get_list("x-request-id") == [response.headers["x-request-id"]]


async def test_the_callers_trace_is_continued(connect: Any) -> None:
    journey = FakeJourney()
    async with connect(fake_services(journey)) as client:
        response = await client.post("/v1/generate", json=BODY, headers={"traceparent": PARENT})
    assert response.headers["x-trace-id"] == TRACE
    assert journey.requests[0].trace_parent == PARENT
    assert journey.requests[0].trace_id == TRACE


async def test_a_stream_without_a_traceparent_reports_a_new_trace_id_in_its_header(connect: Any) -> None:
    journey = FakeJourney()
    async with connect(fake_services(journey)) as client:
        response = await client.post("/v1/generate", json={**BODY, "stream": True})
    assert journey.requests[0].trace_parent is None
    assert response.headers["x-trace-id"] == journey.requests[0].trace_id


async def test_a_repeated_tracestate_is_one_list_and_a_repeated_traceparent_begins_a_new_trace(
    connect: Any,
) -> None:
    journey = FakeJourney()
    states = [("tracestate", "a=1,b=2"), ("x-other", "y"), ("tracestate", ""), ("tracestate", "c=3")]
    async with connect(fake_services(journey)) as client:
        for parents in ([("traceparent", PARENT)], [("traceparent", PARENT), ("traceparent", PARENT)]):
            await client.post("/v1/generate", json=BODY, headers=[*parents, *states])
    once, twice = journey.requests
    assert (once.trace_id, once.trace_parent, once.trace_state) == (TRACE, PARENT, "a=1,b=2,,c=3")
    assert twice.trace_id != TRACE and twice.trace_parent is None and twice.trace_state is None


@pytest.mark.parametrize(
    ("header", "used"),
    [
        (b"my-id 1", "my-id 1"),
        (b"x" * 128, "x" * 128),
        (b"x" * 129, None),
        (b"", None),
        (b" ", None),
        ("é".encode(), None),
        (b"a\x7fb", None),
    ],
)
def test_a_request_id_header_is_used_when_it_is_short_and_printable(header: bytes, used: str | None) -> None:
    assert usable_request_id(header) == used


async def test_the_bodys_request_id_wins_over_the_headers_and_is_made_safe_for_a_header(
    connect: Any,
) -> None:
    async with connect(fake_services()) as client:
        headers = {"x-request-id": "from-header"}
        plain = await client.post("/v1/generate", json=BODY, headers=headers)
        both = await client.post("/v1/generate", json={**BODY, "request_id": "顧客 1"}, headers=headers)
    assert plain.headers["x-request-id"] == plain.json()["request_id"] == "from-header"
    assert both.json()["request_id"] == "顧客 1"
    assert both.headers["x-request-id"] == "%E9%A1%A7%E5%AE%A2 1"


@pytest.mark.parametrize(
    ("path", "served"), [("/chat/completions", "/v1/chat/completions"), ("/v1/v1/messages", "/v1/messages")]
)
async def test_a_base_url_that_lacks_or_repeats_v1_is_404_and_the_message_says_so(
    connect: Any, path: str, served: str
) -> None:
    async with connect(fake_services()) as client:
        response = await client.post(path, json=BODY)
        other = await client.post("/chat", json=BODY)
    assert response.status_code == other.status_code == 404
    assert f"; {served} is served: correct the base URL's /v1" in response.json()["error"]["message"]
    assert other.json()["error"]["message"] == "there is nothing at /chat"


async def test_a_plain_request_to_the_websockets_path_is_426(connect: Any) -> None:
    async with connect(fake_services()) as client:
        response = await client.get("/v1/generate/ws")
    assert response.status_code == 426
    assert response.headers["upgrade"] == "websocket"
    assert response.json()["error"]["code"] == "upgrade_required"


async def test_only_a_request_id_in_the_body_marks_the_request_as_labelled(connect: Any) -> None:
    journey = FakeJourney()
    async with connect(fake_services(journey)) as client:
        for path, body in (("/v1/generate", BODY), ("/v1/chat/completions", CHAT)):
            await client.post(path, json=body, headers={"x-request-id": "theirs"})
            inner = {"request_id": "mine"}
            labelled = {**body, **(inner if body is BODY else {"sluice": inner})}
            await client.post(path, json=labelled, headers={"x-request-id": "theirs"})
    found = [(request.request_id, request.labelled) for request in journey.requests]
    assert found == [("theirs", False), ("mine", True)] * 2


@pytest.mark.parametrize("path", [*POSTED, "/v1/models", "/v1/models/demo", "/health/deep"])
async def test_a_key_is_asked_for(connect: Any, path: str) -> None:
    method = "GET" if "models" in path or "health" in path else "POST"
    async with connect(fake_services()) as client:
        for header, code in [("", "missing_key"), ("Basic x", "missing_key"), ("Bearer nope", "invalid_key")]:
            response = await client.request(method, path, json={}, headers={"authorization": header})
            assert response.status_code == 401
            error = response.json()["error"]
            # OpenAI's paths have OpenAI's name of the error in ``code``.
            assert error.get("sluice_code", error["code"]) == code
            assert response.headers["www-authenticate"] == "Bearer"
            assert "nope" not in response.text


async def test_the_scheme_of_the_key_is_not_case_sensitive(connect: Any) -> None:
    async with connect(fake_services()) as client:
        headers = {"authorization": f"bearer  {CALLER_KEY}"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
async def test_a_key_also_travels_in_the_headers_of_other_contracts_clients(
    connect: Any, header: str
) -> None:
    async with connect(fake_services()) as client:
        for authorization in ("", "Basic x"):
            headers = {"authorization": authorization, header: CALLER_KEY}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        wrong = await client.get("/v1/models", headers={"authorization": "", header: "nope"})
        first = await client.get("/v1/models", headers={"authorization": "Bearer nope", header: CALLER_KEY})
    assert (wrong.status_code, first.status_code) == (401, 401)


PAGE = "https://console.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type"}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
async def test_pages_of_configured_origins_may_ask_and_read(connect: Any, path: str) -> None:
    async with connect(fake_services(limits=ServerConfig(cors_origins=(PAGE,)))) as client:
        asked = await client.options(path, headers=PREFLIGHT)
        method = "GET" if path == "/v1/models" else "POST"
        answer = await client.request(method, path, json=CHAT, headers={"origin": PAGE})
        refused = await client.post(path, json={}, headers={"origin": PAGE, "authorization": ""})
        other = await client.options(path, headers={**PREFLIGHT, "origin": "https://evil.example"})
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    for one in (answer, refused):
        assert one.headers["access-control-allow-origin"] == PAGE and one.headers["x-request-id"]
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("path", "contract"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/rerank", "rerank"),
        ("/v2/rerank", "rerank"),
        ("/v1/score", "rerank"),
        ("/v1/audio/transcriptions", "audio"),
        ("/v1/audio/translations", "audio"),
        ("/tokenize", None),
    ],
)
async def test_a_refused_request_is_counted_with_those_that_are_answered(
    connect: Any, path: str, contract: str | None
) -> None:
    outcomes: list[EdgeRequest] = []
    async with connect(fake_services(emit_edge=outcomes.append)) as client:
        await client.post(path, json={})
    assert [(one.contract, (one.status or 0) >= 400) for one in outcomes] == [(contract, True)]


@pytest.mark.parametrize(
    ("method", "path", "label"),
    [
        ("GET", "/v1/models", "/v1/models"),
        ("GET", "/v1/models/a/b", "/v1/models/{id:path}"),
        ("PATCH", "/admin/keys/sk-secret", "/admin/keys/{id}"),
        ("PUT", "/admin/keys/sk-secret", "/admin/keys/{id}"),
        ("GET", "/admin/keys/sk-secret/more", "unknown"),
        ("POST", "/v1/chat/completions", "/v1/chat/completions"),
        ("PUT", "/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "/v1/generate/ws", "/v1/generate/ws"),
        ("GET", "/sk-secret", "unknown"),
    ],
)
async def test_a_request_is_reported_with_the_path_of_its_route(
    connect: Any, method: str, path: str, label: str
) -> None:
    outcomes: list[EdgeRequest] = []
    async with connect(fake_services(emit_edge=outcomes.append)) as client:
        await client.request(method, path, headers={"authorization": "Bearer wrong"})
    assert [one.path for one in outcomes] == [label]


@pytest.mark.parametrize("path", OPENAI)
async def test_openais_paths_answer_with_openais_error(connect: Any, path: str) -> None:
    async with connect(fake_services()) as client:
        response = await client.request("PATCH", path)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "sluice_code"}
    assert response.status_code in (404, 405)
    assert error["type"] == ("not_found_error" if response.status_code == 404 else "invalid_request_error")


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/v1/generate", 405), ("/ping", 405)])
async def test_other_paths_answer_with_the_native_error(connect: Any, path: str, status: int) -> None:
    async with connect(fake_services()) as client:
        response = await client.request("PATCH", path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"code", "message", "param", "request_id", "retry_after_ms"}
    if status == 405:
        assert response.headers["allow"]


async def test_allow_has_head_where_get_works(connect: Any) -> None:
    async with connect(fake_services()) as client:
        assert (await client.put("/v1/models")).headers["allow"] == "GET, HEAD"
        assert (await client.put("/v1/generate")).headers["allow"] == "POST"
        assert (await client.head("/v1/models")).status_code == 200


async def test_what_does_not_validate_is_422_natively_and_400_in_openais_contract(connect: Any) -> None:
    async with connect(fake_services()) as client:
        native = await client.post("/v1/generate", json={"messages": []})
        openai = await client.post("/v1/chat/completions", json={"model": "demo", "messages": []})
        broken = [await client.post(path, content=b"{") for path in ("/v1/generate", "/v1/completions")]
    assert native.status_code == 422
    assert native.json()["error"]["param"] == "messages"
    assert openai.status_code == 400
    assert openai.json()["error"]["param"] == "messages"
    assert openai.json()["error"]["type"] == "invalid_request_error"
    assert [one.status_code for one in broken] == [400, 400]
    assert {one.json()["error"]["code"] for one in broken} == {"invalid_json"}


@pytest.mark.parametrize("path", POSTED)
async def test_a_body_over_the_limit_is_413_whether_declared_or_streamed(connect: Any, path: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 100

    async with connect(fake_services(limits=ServerConfig(max_body_bytes=1_024))) as client:
        declared = await client.post(path, content=b"x" * 1_025)
        streamed = await client.post(path, content=pieces())
    for response in (declared, streamed):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert "1024" in response.json()["error"]["message"]


async def test_ten_thousand_messages_are_refused_by_their_count(connect: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}] * 10_000}
    async with connect(fake_services()) as client:
        response = await client.post("/v1/generate", json=body)
    assert response.status_code == 422
    assert "allowed: 1 to 2048" in response.json()["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize("path", POSTED)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=80))
async def test_no_body_whatever_makes_an_internal_error(connect: Any, path: str, body: bytes) -> None:
    async with connect(fake_services()) as client:
        response = await client.post(path, content=body)
    assert 200 <= response.status_code < 500
    if response.status_code != 200:
        assert response.json()["error"]["code"] in {"invalid_json", "invalid_request"}


class Settings(BaseModel):
    percent: int


async def test_routers_added_later_answer_their_errors_in_the_same_shape() -> None:
    import httpx

    app = create_app(fake_services())
    router = APIRouter(prefix="/admin")

    @router.put("/later")
    async def put(body: Settings) -> dict[str, int]:
        if body.percent == 1:
            raise UnknownRoute("no such route", param="route")
        if body.percent == 2:
            raise UnknownAdapter("a", ())
        if body.percent == 3:
            raise ValueError("a secret")
        return {"percent": body.percent}

    app.include_router(router)
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://gw") as client:
        answers = [await client.put("/admin/later", json={"percent": one}) for one in (0, 1, 2, 3, "secret")]
        broken = await client.put("/admin/later", content=b"{", headers={"content-type": "application/json"})
    assert [one.status_code for one in answers] == [200, 404, 404, 500, 422]
    assert [one.json()["error"]["code"] for one in answers[1:]] == [
        "unknown_route",
        "unknown_adapter",
        "internal",
        "invalid_request",
    ]
    assert answers[4].json()["error"]["param"] == "percent"
    assert all("secret" not in one.text for one in answers)
    assert broken.json()["error"]["code"] == "invalid_json"
    assert all(one.headers["x-request-id"] for one in [*answers, broken])


async def test_the_openapi_document_tells_of_every_path_and_resolves(connect: Any) -> None:
    async with connect(fake_services()) as client:
        document = (await client.get("/openapi.json")).json()
    assert set(document["paths"]) >= {*POSTED, "/ping", "/ready", "/health/deep", "/metrics", "/v1/models"}
    text = json.dumps(document)
    schemas = document["components"]["schemas"]
    assert {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]} <= set(schemas)
    assert "temperature" in schemas["NativeSampling"]["properties"]


async def test_a_request_that_waits_when_the_server_stops_is_told_so_and_is_no_defect() -> None:
    begun = asyncio.Event()
    sent: list[Any] = []

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    app = EdgeMiddleware(waits, services=fake_services())
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(app(scope, receive, send))
        await begun.wait()
        serving.cancel()
    assert not serving.cancelled(), "the server logs each exception as a defect of the application"
    assert sent[0]["status"] == 503 and b'"draining"' in sent[1]["body"]
