"""Connections that only take resources, and requests that two servers would read differently."""

from __future__ import annotations

import asyncio
import json
import re
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.http.connections import ConnectionTable
from gateway.http.protocol import GatewayProtocol
from gateway.http.security import MAX_HEAD_BYTES, MAX_HEADERS, SECURITY_HEADERS
from gateway.testing import ADMIN_KEY, CALLER_KEY, FakeJourney, fake_services, serving
from tests.http.fakes import eventually

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
AUTH = f"host: gw\r\nauthorization: Bearer {CALLER_KEY}\r\n".encode()
PING = b"GET /ping HTTP/1.1\r\nhost: gw\r\n\r\n"
LAST_PING = b"GET /ping HTTP/1.1\r\nhost: gw\r\nconnection: close\r\n\r\n"
SMUGGLED = b"POST /v1/generate HTTP/1.1\r\n" + AUTH + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)


class ShortTimeouts(GatewayProtocol):
    table = ConnectionTable()
    head_s = 0.2
    linger_s = 1.5
    stall_s = 0.3


class ShortKeepAlive(GatewayProtocol):
    """Closes a silent connection after 0.2 s."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.timeout_keep_alive = 0.2  # type: ignore[assignment]
        super().connection_made(transport)


class TwoConnections(GatewayProtocol):
    """Closes idle connections only to make room: a slow machine may take seconds between two requests."""

    table = ConnectionTable(total=2, per_address=4)
    surplus_head_s = 0.5

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.timeout_keep_alive = 60
        super().connection_made(transport)


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_all(sock: socket.socket) -> bytes:
    """Read all bytes until the server closes the connection."""
    pieces = []
    try:
        while piece := sock.recv(65_536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def read_one(sock: socket.socket) -> bytes:
    """Read one answer, which may come in several segments."""
    answer = b""
    while not (whole := re.match(rb"(?s).*?\r\ncontent-length: (\d+)\r\n.*?\r\n\r\n(.*)", answer)) or (
        len(whole[2]) < int(whole[1])
    ):
        piece = sock.recv(4_096)
        assert piece, answer
        answer += piece
    return answer


def send_and_read(url: str, raw: bytes) -> bytes:
    """Send ``raw`` on a new connection, and read all bytes until it ends."""
    with connected(url) as sock:
        sock.sendall(raw)
        return read_all(sock)


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


@pytest.fixture(scope="module")
def journey() -> FakeJourney:
    return FakeJourney()


@pytest.fixture(scope="module")
def url(journey: FakeJourney) -> Iterator[str]:
    with serving(fake_services(journey), http=ShortTimeouts) as found:
        yield found


@contextmanager
def expect_requests(journey: FakeJourney, requests: int) -> Iterator[None]:
    before = len(journey.requests)
    yield
    assert len(journey.requests) - before == requests


def post(headers: bytes, body: bytes = BODY) -> bytes:
    return b"POST /v1/generate HTTP/1.1\r\n" + AUTH + headers + b"\r\n" + body


CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"content-length: %d\r\n" % len(BODY)


@pytest.mark.parametrize(("version", "interim"), [(b"1.1", [100]), (b"1.0", [])])
def test_only_a_client_of_http_1_1_is_told_to_continue(url: str, version: bytes, interim: list[int]) -> None:
    head = post(b"expect: 100-continue\r\nconnection: close\r\n" + LENGTH, b"")
    with connected(url) as sock:
        sock.sendall(head.replace(b"HTTP/1.1", b"HTTP/" + version, 1))
        told = bool(select.select([sock], [], [], 30 if interim else 0.1)[0])
        assert statuses(sock.recv(65_536) if told else b"") == interim
        sock.sendall(BODY)
        assert statuses(read_all(sock)) == [200]


def test_a_length_and_chunks_are_one_request_each(url: str, journey: FakeJourney) -> None:
    with expect_requests(journey, 2):
        assert statuses(send_and_read(url, post(LENGTH + b"connection: close\r\n"))) == [200]
        assert statuses(
            send_and_read(url, post(b"transfer-encoding: chunked\r\nconnection: close\r\n", CHUNKED))
        ) == [200]


@pytest.mark.parametrize("padding", [0, 100_000])
@pytest.mark.parametrize("pieces", [1, 2, 30])
def test_a_body_in_many_pieces_is_read_as_in_one(
    url: str, journey: FakeJourney, pieces: int, padding: int
) -> None:
    body = BODY + b" " * padding
    size = -(-len(body) // pieces)
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts])
    with expect_requests(journey, 1):
        coding = b"transfer-encoding: chunked\r\nconnection: close\r\n"
        assert statuses(send_and_read(url, post(coding, chunks + b"0\r\n\r\n"))) == [200]
    assert journey.requests[-1].messages[0].content == "hi"


@pytest.mark.parametrize(
    "raw",
    [
        post(LENGTH + b"transfer-encoding: chunked\r\n", CHUNKED + SMUGGLED),
        post(b"transfer-encoding: chunked\r\n" + LENGTH, CHUNKED + SMUGGLED),
        post(b"content-length: 5\r\n" + LENGTH, BODY + SMUGGLED),
        post(LENGTH + LENGTH, BODY + SMUGGLED),
        post(b"content-length: +%d\r\n" % len(BODY), BODY + SMUGGLED),
        post(b"content-length: %d, %d\r\n" % (len(BODY), len(BODY)), BODY + SMUGGLED),
        post(b"content-length: -1\r\n", BODY + SMUGGLED),
        post(b"content-length: 0x10\r\n", BODY + SMUGGLED),
        post(b"content-length : %d\r\n" % len(BODY), BODY + SMUGGLED),
        post(b"content-length: 99999999999999999999999\r\n", BODY + SMUGGLED),
        post(b"transfer-encoding: chunked, identity\r\n", CHUNKED + SMUGGLED),
        post(b"transfer-encoding: xchunked\r\n", CHUNKED + SMUGGLED),
        post(b"transfer-encoding : chunked\r\n", CHUNKED + SMUGGLED),
        post(b"transfer-encoding: chunked\r\n", b"ZZ\r\n" + BODY + b"\r\n0\r\n\r\n" + SMUGGLED),
        post(b"transfer-encoding: chunked\r\n", b"-1\r\n" + BODY + b"\r\n0\r\n\r\n" + SMUGGLED),
        post(b"x: a\x00b\r\n" + LENGTH, BODY + SMUGGLED),
        post(b"x: a\rb: c\r\n" + LENGTH, BODY + SMUGGLED),
        post(b"x: a\r\n folded\r\n" + b"\x0b" + LENGTH, BODY + SMUGGLED),
        b"POST /v1/generate HTTP/1.1 \r\n" + AUTH + LENGTH + b"x\r\n\r\n" + BODY + SMUGGLED,
        b"POST  /v1/generate HTTP/9.9\r\n" + AUTH + LENGTH + b"\r\n" + BODY + SMUGGLED,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SMUGGLED,
    ],
    ids=lambda raw: raw.split(b"\r\n")[3][:40].decode("latin-1") if raw.count(b"\r\n") > 3 else "rubbish",
)
def test_what_two_servers_could_read_differently_is_refused_and_ends_the_connection(
    url: str, journey: FakeJourney, raw: bytes
) -> None:
    with expect_requests(journey, 0):
        answer = send_and_read(url, raw)
    assert statuses(answer) in ([400], [413], [501]), answer[:200]
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert error["code"] in ("invalid_request", "body_too_large") and error["request_id"]
    for name, value in SECURITY_HEADERS:
        assert name + b": " + value in answer


def test_two_pipelined_requests_get_an_answer_each(url: str, journey: FakeJourney) -> None:
    with expect_requests(journey, 2), connected(url) as sock:
        sock.sendall(SMUGGLED + post(LENGTH + b"connection: close\r\n"))
        assert statuses(read_all(sock)) == [200, 200]


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"x-%d: 1\r\n" % number for number in range(MAX_HEADERS + 1)),
        b"x: " + b"a" * MAX_HEAD_BYTES + b"\r\n",
        b"".join(b"x-%d: %b\r\n" % (number, b"a" * 1_000) for number in range(40)),
    ],
    ids=["too many", "one too long", "too long together"],
)
def test_headers_beyond_their_bounds_are_431(url: str, journey: FakeJourney, head: bytes) -> None:
    with expect_requests(journey, 0):
        answer = send_and_read(url, post(head + LENGTH))
    assert statuses(answer) == [431]
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "headers_too_large"


def test_a_header_or_a_request_line_that_never_ends_is_not_kept(url: str) -> None:
    for start in (b"GET /ping HTTP/1.1\r\nx: ", b"GET /"):
        with connected(url) as sock:
            sent = sock.send(start)
            try:
                while sent < 4 * MAX_HEAD_BYTES:
                    sent += sock.send(b"a" * 8_192)
                    time.sleep(0.001)
            except OSError:
                pass
            answer = read_all(sock)
            assert sent < 4 * MAX_HEAD_BYTES or statuses(answer) == [431]


@pytest.mark.parametrize(
    ("start", "trickle"),
    [
        (b"P", b""),
        (b"GET /", b"a"),
        (b"POST /v1/generate HTTP/1.1\r\nhost: gw\r\n", b"x: y\r\n"),
        (b"\r\n", b"\r\n"),
    ],
)
def test_headers_that_do_not_come_are_408_however_slowly_they_trickle(
    url: str, start: bytes, trickle: bytes
) -> None:
    with connected(url) as sock:
        begun = time.monotonic()
        sock.sendall(start)
        sock.settimeout(0.05)
        answer = b""
        while time.monotonic() - begun < 60 and not answer:
            try:
                answer = sock.recv(4_096)
            except TimeoutError:
                sock.sendall(trickle)
        assert statuses(answer) == [408] and time.monotonic() - begun >= ShortTimeouts.head_s / 2


def test_a_connection_that_sends_nothing_is_closed() -> None:
    with serving(fake_services(), http=ShortKeepAlive) as url, connected(url) as sock:
        assert read_all(sock) == b""


def test_the_rest_of_a_refused_body_is_read_for_a_bounded_time_only(url: str) -> None:
    """The key is wrong, so the answer comes first; then the body trickles."""
    raw = (
        b"POST /v1/generate HTTP/1.1\r\nhost: gw\r\nauthorization: Bearer no\r\ncontent-length: 1000\r\n\r\n"
    )
    with connected(url) as sock:
        sock.sendall(raw + b"a")
        assert statuses(read_one(sock)) == [401]
        begun = time.monotonic()
        ended = False
        while time.monotonic() - begun < 60 and not ended:
            try:
                sock.sendall(b"a")
                time.sleep(0.02)
                sock.settimeout(0.001)
                ended = not sock.recv(1)
            except TimeoutError:
                continue
            except OSError:
                ended = True
        assert ended


def test_a_connection_stays_open_when_a_refused_body_arrives_whole(url: str) -> None:
    refused = b"POST /v1/generate HTTP/1.1\r\nhost: gw\r\nauthorization: Bearer no\r\n" + LENGTH + b"\r\n"
    with connected(url) as sock:
        sock.sendall(refused)
        assert statuses(read_one(sock)) == [401]
        sock.sendall(BODY)
        sock.sendall(post(LENGTH + b"connection: close\r\n"))
        assert statuses(read_all(sock)) == [200]


@pytest.mark.parametrize("size", [len(BODY), 8 * MAX_HEAD_BYTES])
def test_the_rest_of_a_refused_body_is_not_taken_for_the_headers_of_a_further_request(
    url: str, size: int
) -> None:
    refused = (
        b"POST /v1/generate HTTP/1.1\r\nhost: gw\r\nauthorization: Bearer no\r\ncontent-length: %d\r\n\r\n"
    )
    with connected(url) as sock:
        sock.sendall(refused % size)
        assert statuses(read_one(sock)) == [401]
        sock.sendall(b"a" * size)
        assert select.select([sock], [], [], 2 * ShortTimeouts.head_s)[0] == [], "an answer to no request"
        sock.sendall(LAST_PING)
        assert statuses(read_all(sock)) == [200]


def test_a_connection_is_closed_when_it_is_silent_after_the_rest_of_a_refused_body() -> None:
    refused = b"POST /nothing HTTP/1.1\r\nhost: gw\r\n" + LENGTH + b"\r\n"
    with serving(fake_services(), http=ShortKeepAlive) as url, connected(url) as sock:
        sock.sendall(refused)
        assert statuses(read_one(sock)) == [404]
        sock.sendall(BODY)
        assert read_all(sock) == b""


def test_headers_that_begin_behind_the_rest_of_a_refused_body_are_bounded_too(url: str) -> None:
    refused = b"POST /nothing HTTP/1.1\r\nhost: gw\r\n" + LENGTH + b"\r\n"
    with connected(url) as sock:
        sock.sendall(refused)
        assert statuses(read_one(sock)) == [404]
        sock.sendall(BODY + b"GET /ping HTTP/1.1\r\nx: ")
        assert statuses(read_all(sock)) == [408]


def test_a_reader_who_takes_nothing_is_cut_off_and_its_work_ended(journey: FakeJourney) -> None:
    endless = FakeJourney(endless=True)
    with serving(fake_services(endless), http=ShortTimeouts) as url, connected(url) as sock:
        body = json.dumps({**json.loads(BODY), "stream": True}).encode()
        sock.sendall(post(b"content-length: %d\r\n" % len(body), body))
        eventually(lambda: endless.running == 1)
        eventually(lambda: endless.cancelled == 1 and endless.running == 0)


def test_a_connection_over_the_limit_gets_503_and_is_closed() -> None:
    """All others have a request in progress. Probes are answered all the same."""
    holding = FakeJourney(holds=True)
    with serving(fake_services(holding), http=TwoConnections) as url:
        with connected(url) as one, connected(url) as other:
            for sock in (one, other):
                sock.sendall(post(LENGTH))
            eventually(lambda: holding.running == 2)
            answer = send_and_read(url, post(LENGTH))
            assert statuses(answer) == [503] and b"retry-after: 1" in answer
            with connected(url) as silent:
                assert statuses(read_all(silent)) == [503]
            for path in (b"/ping", b"/ready", b"/health"):
                answer = send_and_read(url, b"GET %b HTTP/1.1\r\nhost: gw\r\n\r\n" % path)
                assert statuses(answer) == [200] and b"connection: close" in answer.lower()
        eventually(
            lambda: statuses(send_and_read(url, LAST_PING)) == [200] and len(TwoConnections.table) == 0
        )


def test_a_new_connection_takes_the_place_of_one_that_never_sent_a_request() -> None:
    with serving(fake_services(), http=TwoConnections) as url, connected(url) as used:
        used.sendall(PING)
        assert statuses(read_one(used)) == [200]
        with connected(url) as silent:
            assert statuses(send_and_read(url, LAST_PING)) == [200]
            assert read_all(silent) == b""
        used.sendall(PING)
        assert statuses(read_one(used)) == [200]


DEEP = 100_000
BOMBS = [
    b'{"messages":' + b"[" * DEEP + b"]" * DEEP + b"}",
    b'{"messages":[{"role":"user","content":"hi"}],"context":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    b'{"messages":[{"role":"user","content":"hi"}],"sampling":{"seed":' + b"9" * 90_000 + b"}}",
    b'{"messages":[{"role":"user","content":"hi"}],"sampling":{"temperature":1e' + b"9" * 90_000 + b"}}",
    b'{"messages":[{"role":"user","content":"hi"}],"context":{"a":' + b"9" * 90_000 + b"}}",
    b'{"messages":[{"role":"user","content":"hi"}],"context":{"a":1' + b"0" * 90_000 + b".5e-90000}}",
    b'{"messages":[' + b'{"role":"user","content":""},' * 3_000 + b'{"role":"user","content":"hi"}]}',
    b'{"messages":[{"role":"user","content":"hi"}],' + b",".join(b'"f%d":1' % n for n in range(8_000)) + b"}",
    b'{"messages":[{"role":"user","content":"\\ud800"}],"context":' + b"[" * DEEP + b"]" * DEEP + b"}",
    b'{"messages":[{"role":"user","content":"hi"}],"response_format":{"type":"json_schema","json_schema":'
    + b'{"not":' * 20_000 + b"{}" + b"}" * 20_000 + b"}}",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BOMBS)))
@pytest.mark.parametrize("path", ["/v1/generate", "/v1/chat/completions", "/tokenize"])
def test_no_body_of_json_costs_much(url: str, number: int, path: str) -> None:
    """Deep nesting, long numbers and many fields are refused or accepted within 5 s of this process's CPU time."""
    body = BOMBS[number]
    head = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    begun = time.process_time()
    answer = send_and_read(url, b"POST %b HTTP/1.1\r\n" % path.encode() + AUTH + head + body)
    assert statuses(answer)[0] in (200, 400, 422), answer[:200]
    assert time.process_time() - begun < 5.0


@pytest.mark.parametrize(
    ("method", "path", "key"),
    [
        ("GET", "/ping", CALLER_KEY),
        ("GET", "/nowhere", CALLER_KEY),
        ("GET", "/openapi.json", CALLER_KEY),
        ("PATCH", "/v1/generate", CALLER_KEY),
        ("POST", "/v1/generate", CALLER_KEY),
        ("POST", "/v1/generate", "wrong"),
        ("GET", "/admin/admission", ADMIN_KEY),
    ],
)
def test_every_answer_has_the_security_headers_and_no_cors_headers(
    url: str, method: str, path: str, key: str
) -> None:
    head = f"{method} {path} HTTP/1.1\r\nhost: gw\r\norigin: https://evil.example\r\n"
    head += f"authorization: Bearer {key}\r\nconnection: close\r\n"
    answer = send_and_read(url, head.encode() + LENGTH + b"\r\n" + BODY).lower()
    for name, value in SECURITY_HEADERS:
        assert answer.count(name + b": " + value.lower()) == 1
    assert b"access-control-" not in answer and b"server:" not in answer


def test_another_origins_preflight_is_allowed_nothing(url: str) -> None:
    raw = (
        b"OPTIONS /v1/generate HTTP/1.1\r\nhost: gw\r\norigin: https://evil.example\r\n"
        b"access-control-request-method: POST\r\nconnection: close\r\n\r\n"
    )
    answer = send_and_read(url, raw)
    assert statuses(answer) == [405] and b"access-control-" not in answer.lower()
