"""What is sent in one write: pieces of a stream, and an answer's head with the first piece of its body."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from gateway.contracts.dialect import Header
from gateway.contracts.events import Delta
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.values import Caller, CallerRole, GenerateRequest
from gateway.errors import DeadlineExceeded, public_error
from gateway.http.connections import ConnectionTable
from gateway.http.exchange import SCOPE_KEY, ClientDisconnect, Exchange, Reply
from gateway.http.generating import dialects_of
from gateway.http.protocol import GatewayProtocol
from gateway.http.sinks import StreamSink
from gateway.requests.in_flight import InFlightRequests
from gateway.server import end_connections
from gateway.testing import answer_for, fake_services


def connection(sent: list[bytes]) -> ClientDisconnect:
    return ClientDisconnect(FlowControl(asyncio.Transport()), sent.append)


def exchange(disconnect: ClientDisconnect | None) -> Exchange:
    async def send(message: MutableMapping[str, Any]) -> None:
        raise AssertionError("nothing is sent through the server")

    return Exchange.open({"headers": [], SCOPE_KEY: disconnect}, send, fake_services())


def test_a_piece_is_sent_as_one_chunk_before_write_returns() -> None:
    sent: list[bytes] = []
    assert exchange(connection(sent)).write(b"data: {}, {}\n\n")
    assert sent == [b"e\r\ndata: {}, {}\n\n\r\n"]


def test_a_piece_that_would_have_to_wait_is_not_sent() -> None:
    sent: list[bytes] = []
    slow = connection(sent)
    assert slow.flow is not None
    slow.flow.pause_writing()
    assert not exchange(slow).write(b"data: 1\n\n") and not sent


@pytest.mark.parametrize("disconnect", [ClientDisconnect(), None])
def test_under_another_server_nothing_is_sent_at_once(disconnect: ClientDisconnect | None) -> None:
    assert not exchange(disconnect).write(b"data: 1\n\n")


def test_nothing_more_is_sent_to_a_caller_who_is_gone() -> None:
    sent: list[bytes] = []
    gone = connection(sent)
    gone.set()
    assert exchange(gone).write(b"data: 1\n\n") and not sent


class Wire(asyncio.Transport):
    """Stores each write, and answers what uvicorn asks of a transport."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


async def answered(
    request: bytes,
    reply: Reply,
    *,
    pieces: int = 0,
    at_once: bool = True,
    http: type[GatewayProtocol] = GatewayProtocol,
) -> Wire:
    """Let the protocol answer a request with ``reply``, or with a stream that repeats its body.

    ``at_once``: a piece of the stream is sent without uvicorn.
    """
    wire, done = Wire(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.open(scope, send, fake_services())
        try:
            if pieces:
                await exchange.begin(reply.status, reply.headers, reply.body, more=True)
                for _ in range(pieces - 1):
                    assert exchange.write(reply.body) is at_once
                    if not at_once:
                        await exchange.body(reply.body, more=True)
                await exchange.body(b"", more=False)
            else:
                await exchange.reply(reply)
        finally:
            done.set()

    config = uvicorn.Config(app, server_header=False, date_header=False, log_config=None)
    config.load()
    protocol = http(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(wire)
    protocol.data_received(request)
    await asyncio.wait_for(done.wait(), 10.0)
    await asyncio.sleep(0)
    protocol.connection_lost(None)
    return wire


GET = b"GET / HTTP/1.1\r\nhost: gateway\r\n\r\n"


async def test_a_whole_answer_is_one_write_with_its_head() -> None:
    wire = await answered(GET, Reply(200, b"{}", headers=((b"x-own", b"1"),)))
    assert len(wire.writes) == 1
    head, _, body = wire.writes[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert body == b"{}" and lines[0] == b"HTTP/1.1 200 OK"
    assert {b"content-length: 2", b"content-type: application/json", b"x-own: 1"} <= set(lines)
    assert not any(line.startswith((b"transfer-encoding", b"connection")) for line in lines)


async def test_a_stream_begins_with_its_head_and_first_piece_in_one_write() -> None:
    wire = await answered(GET, Reply(200, b"data: 1\n\n"), pieces=2)
    head, _, chunk = wire.writes[0].partition(b"\r\n\r\n")
    assert b"\r\ntransfer-encoding: chunked" in head and chunk == b"9\r\ndata: 1\n\n\r\n"
    assert wire.writes[1:] == [chunk, b"0\r\n\r\n"]


async def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection() -> None:
    get = GET.replace(b"HTTP/1.1", b"HTTP/1.0")
    wire = await answered(get, Reply(200, b"data: 1\n\n"), pieces=3, at_once=False)
    head, _, body = b"".join(wire.writes).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head and b"transfer-encoding" not in head
    assert body == 3 * b"data: 1\n\n" and wire.closed
    whole = b"".join((await answered(get, Reply(200, b"{}"))).writes)
    assert b"\r\ncontent-length: 2\r\n" in whole and whole.endswith(b"\r\n\r\n{}")


async def test_a_connection_that_its_caller_ends_is_closed_after_the_answer() -> None:
    wire = await answered(GET[:-2] + b"connection: close\r\n\r\n", Reply(200, b"{}"))
    assert len(wire.writes) == 1 and b"\r\nconnection: close\r\n" in wire.writes[0]
    assert wire.closed


class Draining(GatewayProtocol):
    """The protocol of a gateway whose drain begins."""

    table = ConnectionTable()


async def test_from_the_beginning_of_a_drain_on_each_answer_ends_its_connection() -> None:
    requests = InFlightRequests(lame_duck_s=60.0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(end_connections(Draining, requests))
        kept = await answered(GET, Reply(200, b"{}"), http=Draining)
        requests.drain()
    ended = [await answered(GET, Reply(200, b"{}"), pieces=pieces, http=Draining) for pieces in (0, 2)]
    found = [b"\r\nconnection: close\r\n" in wire.writes[0] for wire in (kept, *ended)]
    assert found == [False, True, True]


async def test_the_answer_to_head_has_no_body() -> None:
    wire = await answered(GET.replace(b"GET", b"HEAD"), Reply(200, b"{}"))
    assert b"content-length: 2" in b"".join(wire.writes)
    assert b"".join(wire.writes).endswith(b"\r\n\r\n")


@pytest.mark.parametrize("header", [(b"x-own", b"1\r\nset-cookie: a"), (b"x-own", b"1\nx: a")])
async def test_a_header_with_a_line_break_is_never_sent(header: Header) -> None:
    wire = await answered(GET, Reply(200, b"{}", headers=(header,)))
    assert b"set-cookie" not in b"".join(wire.writes) and b"\nx: a" not in b"".join(wire.writes)


async def test_under_another_server_an_answer_is_sent_as_two_messages() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await Exchange.open({"headers": []}, send, fake_services()).reply(Reply(200, b"{}"))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[1] == {"type": "http.response.body", "body": b"{}", "more_body": False}


def stream_sink(exchange: Exchange) -> tuple[StreamSink, GenerateRequest]:
    async def keep(*_: object) -> None:
        """Nothing is stored."""

    [dialect, *_] = dialects_of(exchange.services).values()
    caller = Caller("acme", CallerRole.CALLER, "key_1")
    origin = RequestOrigin("req_1", "gen_1", caller, 0.0, 0, "0" * 32)
    asked = dialect.parse(b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true}', origin)
    return StreamSink(exchange, dialect, asked, keep), asked.request


@pytest.mark.parametrize("waits_for", ["limits", "reader"])
async def test_a_piece_that_a_deadline_stops_on_its_way_goes_out_with_the_end(waits_for: str) -> None:
    sent: list[bytes] = []
    ready = asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        await ready.wait()  # as uvicorn does, before it writes
        sent.append(message.get("body", b""))

    async def limits() -> list[Header]:
        await ready.wait()
        return []

    disconnect = connection(sent)
    exchange = Exchange.open({"headers": [], SCOPE_KEY: disconnect}, send, fake_services())
    if waits_for == "limits":
        exchange.limit_headers = limits
    sink, request = stream_sink(exchange)
    if waits_for == "reader":
        ready.set()
        await sink.delta(Delta("Hello", 1))
        ready.clear()
        assert disconnect.flow is not None
        disconnect.flow.pause_writing()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sink.delta(Delta(" world", 1)), 0.01)
    ready.set()
    await sink.finish(answer_for(request, "Hello world"))
    assert b"".join(sent).count(b" world") == 1


async def test_a_stream_that_is_ended_while_the_limits_for_its_head_are_read_gets_its_error() -> None:
    sent: list[str] = []
    known = asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message["type"])

    async def limits() -> list[Header]:
        await known.wait()
        return []

    exchange = Exchange.open({"headers": []}, send, fake_services())
    exchange.limit_headers = limits
    sink, _ = stream_sink(exchange)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sink.delta(Delta("Hello", 1)), 0.01)
    known.set()
    await sink.fail(public_error(DeadlineExceeded("too late")))
    assert sent == ["http.response.start", "http.response.body"]
    assert exchange.status == 504
