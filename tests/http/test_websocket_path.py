from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.config.settings import ServerConfig
from gateway.contracts.events import Delta
from gateway.errors import PublicError
from gateway.http.exchange import Exchange
from gateway.http.middleware import EdgeMiddleware
from gateway.http.sinks import SocketSink
from gateway.http.websocket import GenerateSocket
from gateway.testing import CALLER_KEY, FakeJourney, fake_services, serving
from tests.http.fakes import eventually

BODY = {"messages": [{"role": "user", "content": "hi"}]}
_KEY_LINE = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
AUTH = {"Authorization": f"Bearer {CALLER_KEY}"}


@pytest.fixture
def journey() -> FakeJourney:
    return FakeJourney(pieces=("こん", "", "にちは"))


@pytest.fixture
def url(journey: FakeJourney) -> Iterator[str]:
    with serving(fake_services(journey, limits=ServerConfig(max_body_bytes=10_000))) as base:
        yield base.replace("http", "ws") + "/v1/generate/ws"


async def all_events(socket: ClientConnection) -> list[Any]:
    got = []
    try:
        while True:
            got.append(json.loads(await socket.recv()))
    except ConnectionClosed:
        return got


class SlowReader(WebSocketsSansIOProtocol):
    """The server's end of a WebSocket whose reader takes a message once it is ``ready``."""

    def __init__(self) -> None:
        self.ready, self.sent = asyncio.Event(), list[Any]()

    async def send(self, message: Any) -> None:
        await self.ready.wait()
        self.sent.append(json.loads(message["text"]) if "text" in message else message["code"])


async def test_the_pieces_that_a_deadline_stops_on_their_way_go_out_before_the_end() -> None:
    reader = SlowReader()
    exchange = Exchange.open({"type": "websocket", "headers": []}, reader.send, fake_services())
    sink = SocketSink(exchange)
    for text in ("Hello", " world"):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sink.delta(Delta(text, 1)), 0.01)
    reader.ready.set()
    await sink.fail(PublicError(504, "deadline_exceeded", "too late"))
    assert [one["delta"] for one in reader.sent[:-2]] == ["Hello", " world"]
    assert (reader.sent[-2]["type"], reader.sent[-2]["partial"], reader.sent[-1]) == ("error", True, 1000)


async def test_the_first_frame_is_the_request_and_the_last_event_closes(
    url: str, journey: FakeJourney
) -> None:
    async with connect(url, additional_headers={**AUTH, "x-request-id": "mine"}) as socket:
        assert socket.response is not None
        assert socket.response.headers["x-request-id"] == "mine"
        assert len(socket.response.headers["x-trace-id"]) == 32
        await socket.send(json.dumps(BODY))
        got = await all_events(socket)
    assert [one["type"] for one in got] == ["token", "token", "done"]
    assert "".join(one["delta"] for one in got[:2]) == "こんにちは"
    assert got[-1]["request_id"] == "mine"
    assert got[-1]["usage"]["output_tokens"] == 137
    assert socket.close_code == 1000
    assert journey.requests[0].stream


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "missing_key"),
        ({"Authorization": "Bearer nope"}, 401, "invalid_key"),
    ],
)
async def test_a_bad_key_is_refused_in_the_handshake(
    url: str, headers: dict[str, str], status: int, code: str
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await connect(url, additional_headers=headers)
    assert refused.value.response.status_code == status
    assert refused.value.response.body is not None
    assert json.loads(refused.value.response.body)["error"]["code"] == code
    assert refused.value.response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("frame", "code", "close"),
    [
        ("{", "invalid_json", 1000),
        ('{"messages":[]}', "invalid_request", 1000),
        (b"binary", "invalid_request", 1003),
        (json.dumps({"messages": [{"role": "user", "content": "x" * 11_000}]}), "body_too_large", 1009),
    ],
    ids=["not json", "not valid", "binary", "too large"],
)
async def test_a_frame_that_is_no_request_gets_an_error_event_and_a_close(
    url: str, frame: str | bytes, code: str, close: int
) -> None:
    async with connect(url, additional_headers=AUTH) as socket:
        await socket.send(frame)
        (event,) = await all_events(socket)
    assert (event["type"], event["partial"], event["error"]["code"]) == ("error", False, code)
    assert socket.close_code == close


async def test_a_journey_that_fails_midway_is_told_as_partial(url: str, journey: FakeJourney) -> None:
    journey.error = PublicError(503, "backend_unavailable", "gone")
    async with connect(url, additional_headers=AUTH) as socket:
        await socket.send(json.dumps(BODY))
        got = await all_events(socket)
    assert (got[-1]["type"], got[-1]["partial"]) == ("error", True)
    assert socket.close_code == 1000


@pytest.mark.parametrize("abrupt", [False, True])
async def test_closing_the_socket_cancels_the_journey(url: str, journey: FakeJourney, abrupt: bool) -> None:
    journey.holds = True
    socket = await connect(url, additional_headers=AUTH)
    await socket.send(json.dumps(BODY))
    await socket.recv()
    if abrupt:
        socket.transport.abort()
    else:
        await socket.close()
    await asyncio.to_thread(eventually, lambda: journey.cancelled == 1)
    assert (journey.cancelled, journey.running) == (1, 0)


async def test_later_frames_are_ignored(url: str, journey: FakeJourney) -> None:
    async with connect(url, additional_headers=AUTH) as socket:
        await socket.send(json.dumps(BODY))
        await socket.send(json.dumps(BODY))
        assert (await all_events(socket))[-1]["type"] == "done"
    assert len(journey.requests) == 1


async def test_the_sink_sends_the_close_frame_together_with_its_last_event() -> None:
    """A drain waits for the sinks only, and then closes the sockets that are still open."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append((message["type"], message.get("code")))

    exchange = Exchange.open({"type": "websocket", "headers": []}, send, fake_services())
    await SocketSink(exchange).fail(PublicError(503, "draining", "no"))
    assert sent == [("websocket.send", None), ("websocket.close", 1000)]


async def test_a_caller_who_sends_nothing_is_closed() -> None:
    sent: list[Any] = []
    connected = False

    async def receive() -> Any:
        nonlocal connected
        if connected:
            await asyncio.Event().wait()
        connected = True
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    services = fake_services()
    socket = GenerateSocket(services, first_frame_s=0.01)
    app = EdgeMiddleware(socket, services=services)
    scope = {
        "type": "websocket",
        "path": "/v1/generate/ws",
        "headers": [(b"authorization", f"Bearer {CALLER_KEY}".encode())],
    }
    await app(scope, receive, send)
    assert [one["type"] for one in sent] == ["websocket.accept", "websocket.send", "websocket.close"]
    assert json.loads(sent[1]["text"])["error"]["code"] == "invalid_request"
    assert sent[2]["code"] == 1008


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/generate/nowhere", {"code": "not_found", "message": "/v1/generate/nowhere takes no WebSocket"}),
        ("/v1/responses", {"code": "not_found", "type": "not_found_error"}),
    ],
)
async def test_a_handshake_on_a_path_without_a_websocket_is_404_in_the_shape_of_the_paths_errors(
    url: str, path: str, error: dict[str, str]
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await connect(url.replace("/v1/generate/ws", path), additional_headers=AUTH)
    answer = refused.value.response
    assert answer.status_code == 404
    assert answer.headers["x-request-id"]
    assert answer.body is not None
    assert error.items() <= json.loads(answer.body)["error"].items()


@pytest.mark.parametrize(
    "head",
    [
        "",
        "Sec-WebSocket-Key: short\r\nSec-WebSocket-Version: 13\r\n",
        f"{_KEY_LINE}Sec-WebSocket-Version: 8\r\n",
    ],
)
async def test_a_handshake_against_the_rules_is_answered_in_the_shape_of_errors(url: str, head: str) -> None:
    answer = await _raw_handshake(url, head)
    fields, _, body = answer.partition(b"\r\n\r\n")
    assert fields.startswith(b"HTTP/1.1 400 ")
    assert b"x-content-type-options: nosniff" in fields
    assert json.loads(body)["error"]["code"] == "invalid_request"
    assert b"short" not in body


async def test_handshakes_and_frames_of_strangers_write_no_line_of_their_own_in_the_log(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(InvalidStatus):
        await connect(f"{url}?note=what-the-caller-wrote")
    async with connect(f"{url}?note=what-the-caller-wrote", additional_headers=AUTH) as socket:
        await socket.send(b"\xff\xfe", text=True)
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(socket.recv(), 60)
    assert socket.close_code == 1007
    server_lines = [one for one in caplog.records if one.name.startswith(("uvicorn", "gateway.websocket"))]
    assert not [one for one in server_lines if one.exc_info or one.levelno >= logging.ERROR]
    assert "what-the-caller-wrote" not in "".join(one.getMessage() for one in server_lines)


async def _raw_handshake(url: str, head: str) -> bytes:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    lines = f"GET {address.path} HTTP/1.1\r\nHost: gw\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    writer.write(f"{lines}Authorization: Bearer {CALLER_KEY}\r\n{head}\r\n".encode())
    try:
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
