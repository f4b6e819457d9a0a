"""Requests as raw bytes: their framing, duplicate or conflicting headers, and upgrades of the connection."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gateway.testing import CALLER_KEY

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
KEY = b"authorization: Bearer %b\r\n" % CALLER_KEY.encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
END = b"0\r\n\r\n"
UPGRADE = b"connection: upgrade\r\nupgrade: websocket\r\n"
SOCKET = UPGRADE + b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes to send, the statuses of all answers, and how many requests reach the journey."""

    name: str
    sent: bytes
    statuses: tuple[int, ...]
    generations: int = 0


def post(head: bytes, body: bytes = b"", *, host: bytes = b"host: gw\r\n", key: bytes = KEY) -> bytes:
    return b"POST /v1/generate HTTP/1.1\r\n" + host + key + head + b"\r\n" + body


def get(head: bytes, line: bytes = b"GET /ping HTTP/1.1") -> bytes:
    return line + b"\r\n" + head + b"\r\n"


ONE = post(LENGTH, BODY)
PING = get(b"host: gw\r\n")
SOCKET_GET = b"GET /v1/generate/ws HTTP/1.1\r\nhost: gw\r\n" + KEY + SOCKET

ACCEPTED = [
    Raw("a length", ONE, (200,), 1),
    Raw("chunks", post(CHUNKED, CHUNK + END), (200,), 1),
    Raw("two requests", ONE + ONE, (200, 200), 2),
    Raw("an empty line between", ONE + b"\r\n" + ONE, (200, 200), 2),
    Raw("a short chunk extension", post(CHUNKED, CHUNK.replace(b"\r\n", b";a=b\r\n", 1) + END), (200,), 1),
    Raw("a trailer", post(CHUNKED, CHUNK + b"0\r\nx-sum: 1\r\n\r\n"), (200,), 1),
    Raw("a key in the trailer", post(CHUNKED, CHUNK + b"0\r\n" + KEY + b"\r\n", key=b""), (401,)),
    Raw("another key in the trailer", post(CHUNKED, CHUNK + b"0\r\nauthorization: x\r\n\r\n"), (200,), 1),
    Raw("two spaces", get(b"host: gw\r\n", b"GET  /ping HTTP/1.1"), (200,)),
    Raw("coding in capitals", post(b"Transfer-Encoding: Chunked\r\n", CHUNK + END), (200,), 1),
    Raw("HTTP/1.0 without a host", b"GET /ping HTTP/1.0\r\n\r\n", (200,)),
    Raw("an empty host", get(b"host:\r\n"), (200,)),
    Raw("an address as the host", get(b"host: [::1]:8000 \r\n"), (200,)),
    Raw("a host with an underscore", get(b"host: sluice_gateway:8000\r\n"), (200,)),
    Raw("an absolute target", get(b"host: gw\r\n", b"GET http://gw/ping HTTP/1.1"), (200,)),
    Raw("an upgrade to h2c", post(b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n" + LENGTH, BODY) + PING, (200, 200), 1),
    Raw("an upgrade to h2c with chunks", post(b"connection: upgrade\r\nupgrade: h2c\r\n" + CHUNKED, CHUNK + END) + PING, (200, 200), 1),
    Raw("an upgrade that is not asked of this connection", post(b"upgrade: websocket\r\n" + LENGTH, BODY), (200,), 1),
    Raw("a request after the last one", post(b"connection: close\r\n" + LENGTH, BODY) + ONE, (200,), 1),
    Raw("a request, then rubbish", ONE + b"\x00\x01\r\n\r\n", (200,), 1),
    Raw("a request, then half a one", ONE + b"GET /ping HTT", (200,), 1),
]  # fmt: skip

REFUSED = [
    Raw("two tenants", post(LENGTH + b"x-sluice-tenant: a\r\nX-Sluice-Tenant: b\r\n", BODY), (400,)),
    Raw("two keys", post(KEY + LENGTH, BODY + ONE), (400,)),
    Raw("two keys in x-api-key", post(b"x-api-key: a\r\nX-Api-Key: b\r\n" + LENGTH, BODY + ONE), (400,)),
    Raw("two hosts", post(b"Host: other\r\n" + LENGTH, BODY + ONE), (400,)),
    Raw("a host with a path", post(LENGTH, BODY + ONE, host=b"host: gw/v1\r\n"), (400,)),
    Raw("a host with a user", post(LENGTH, BODY + ONE, host=b"host: user@gw\r\n"), (400,)),
    Raw("a host of two words", post(LENGTH, BODY + ONE, host=b"host: gw other\r\n"), (400,)),
    Raw("a list of hosts", post(LENGTH, BODY + ONE, host=b"host: gw:1, other:2\r\n"), (400,)),
    Raw("a host with a port of letters", post(LENGTH, BODY + ONE, host=b"host: gw:http\r\n"), (400,)),
    Raw("no host", post(LENGTH, BODY + ONE, host=b""), (400,)),
    Raw("two lengths that agree", post(LENGTH + LENGTH, BODY + ONE), (400,)),
    Raw("two lengths", post(b"content-length: 3\r\n" + LENGTH, BODY + ONE), (400,)),
    Raw("a list of lengths", post(b"content-length: %d, %d\r\n" % (len(BODY), len(BODY)), BODY + ONE), (400,)),
    Raw("a signed length", post(b"content-length: +%d\r\n" % len(BODY), BODY + ONE), (400,)),
    Raw("a hexadecimal length", post(b"content-length: 0x1f\r\n", BODY + ONE), (400,)),
    Raw("a length with an underscore", post(b"content-length: 1_0\r\n", BODY + ONE), (400,)),
    Raw("a length that overflows", post(b"content-length: 18446744073709551617\r\n", BODY + ONE), (400,)),
    Raw("an empty length", post(b"content-length:\r\n", BODY + ONE), (400,)),
    Raw("a length and chunks", post(LENGTH + CHUNKED, CHUNK + END + ONE), (400,)),
    Raw("chunks and a length", post(CHUNKED + LENGTH, CHUNK + END + ONE), (400,)),
    Raw("gzip, then chunks", post(b"transfer-encoding: gzip, chunked\r\n", CHUNK + END + ONE), (501,)),
    Raw("gzip alone", post(b"transfer-encoding: gzip\r\n", BODY + ONE), (501,)),
    Raw("identity", post(b"transfer-encoding: identity\r\n" + LENGTH, BODY + ONE), (501,)),
    Raw("chunks, then identity", post(b"transfer-encoding: chunked, identity\r\n", CHUNK + END + ONE), (400,)),
    Raw("a coding that looks like chunks", post(b"transfer-encoding: xchunked\r\n", CHUNK + END + ONE), (501,)),
    Raw("a coding with a vertical tab", post(b"transfer-encoding: \x0bchunked\r\n", CHUNK + END + ONE), (400,)),
    Raw("two codings", post(CHUNKED + CHUNKED, CHUNK + END + ONE), (400,)),
    Raw("an empty coding", post(b"transfer-encoding:\r\n", CHUNK + END + ONE), (400,)),
    Raw("chunks in HTTP/1.0", post(CHUNKED, CHUNK + END).replace(b"HTTP/1.1", b"HTTP/1.0", 1), (501,)),
    Raw("a space before the colon", post(b"content-length : %d\r\n" % len(BODY), BODY + ONE), (400,)),
    Raw("a folded header", post(b"x: a\r\n b\r\n" + LENGTH, BODY + ONE), (400,)),
    Raw("a folded coding", post(b"transfer-encoding:\r\n chunked\r\n", CHUNK + END + ONE), (400,)),
    Raw("a header that begins with a space", post(b" x: a\r\n" + LENGTH, BODY + ONE), (400,)),
    Raw("a bare CR in a value", post(b"x: a\rb: c\r\n" + LENGTH, BODY + ONE), (400,)),
    Raw("a bare LF at a header's end", post(b"x: a\n" + LENGTH, BODY + ONE), (400,)),
    Raw("a bare LF at the line's end", ONE.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n", 1), (400,)),
    Raw("a bare CR at the line's end", ONE.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r", 1), (400,)),
    Raw("NUL in a value", post(b"x: a\x00b\r\n" + LENGTH, BODY + ONE), (400,)),
    Raw("NUL in a name", post(b"x\x00y: a\r\n" + LENGTH, BODY + ONE), (400,)),
    Raw("a name of other letters", post("x-\u00e9: a\r\n".encode() + LENGTH, BODY + ONE), (400,)),
    Raw("no name", post(b": a\r\n" + LENGTH, BODY + ONE), (400,)),
    Raw("no colon", post(b"x\r\n" + LENGTH, BODY + ONE), (400,)),
    Raw("a chunk without its end", post(CHUNKED, b"%x\r\n%bX0\r\n\r\n" % (len(BODY), BODY)), (400,)),
    Raw("a chunk of no number", post(CHUNKED, b"ZZ\r\n" + BODY + b"\r\n" + END), (400,)),
    Raw("a chunk of a negative size", post(CHUNKED, b"-1\r\n" + BODY + b"\r\n" + END), (400,)),
    Raw("a chunk of 0x", post(CHUNKED, b"0x%x\r\n%b\r\n" % (len(BODY), BODY) + END), (400,)),
    Raw("a chunk that overflows", post(CHUNKED, b"fffffffffffffffff\r\n" + BODY + b"\r\n" + END), (400,)),
    Raw("a space after a chunk's size", post(CHUNKED, CHUNK.replace(b"\r\n", b" \r\n", 1) + END), (400,)),
    Raw("a bare LF after a chunk's size", post(CHUNKED, CHUNK.replace(b"\r\n", b"\n", 1) + END), (400,)),
    Raw("NUL in a chunk extension", post(CHUNKED, CHUNK.replace(b"\r\n", b";a=\x00\r\n", 1) + END), (400,)),
    Raw("a bare LF in a chunk extension", post(CHUNKED, CHUNK.replace(b"\r\n", b";a\n\r\n", 1) + END), (400,)),
    Raw("a length in the trailer", post(CHUNKED, CHUNK + b"0\r\ncontent-length: 4\r\n\r\n"), (400,)),
    Raw("a trailer that never ends", post(CHUNKED, CHUNK + b"0\r\n" + b"x: %b\r\n" % (b"a" * 4_000) * 10), (431,)),
    Raw("HTTP/2.0", get(b"host: gw\r\n", b"GET /ping HTTP/2.0"), (505,)),
    Raw("HTTP/0.9", get(b"host: gw\r\n", b"GET /ping HTTP/0.9"), (505,)),
    Raw("HTTP/1.2", get(b"host: gw\r\n", b"GET /ping HTTP/1.2"), (400,)),
    Raw("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
    Raw("no version", b"GET /ping\r\n\r\n", (505,)),
    Raw("no target", get(b"host: gw\r\n", b"GET HTTP/1.1"), (400,)),
    Raw("a tab for a space", get(b"host: gw\r\n", b"GET\t/ping HTTP/1.1"), (400,)),
    Raw("a method in small letters", get(b"host: gw\r\n", b"get /ping HTTP/1.1"), (400,)),
    Raw("CONNECT", get(b"host: gw\r\n", b"CONNECT gw:80 HTTP/1.1"), (400,)),
    Raw("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + ONE, (400,)),
    Raw("a WebSocket with a length", SOCKET_GET + LENGTH + b"\r\n" + BODY, (400,)),
    Raw("a WebSocket with a length of 0", SOCKET_GET + b"content-length: 0\r\n\r\n", (400,)),
    Raw("a WebSocket with chunks", SOCKET_GET + CHUNKED + b"\r\n" + CHUNK + END, (400,)),
    Raw("a WebSocket by POST", post(SOCKET + LENGTH, BODY + ONE), (400,)),
    Raw("a WebSocket, and bytes at once", SOCKET_GET + b"\r\n" + PING, (400,)),
    Raw("a WebSocket in HTTP/1.0", (SOCKET_GET + b"\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"), (400,)),
    Raw("a WebSocket without its headers", get(b"host: gw\r\n" + KEY + UPGRADE, b"GET /v1/generate/ws HTTP/1.1"), (400,)),
    Raw("a WebSocket with a long line", get(b"host: gw\r\n" + SOCKET, b"GET /v1/generate/ws?" + b"a" * 9_000 + b" HTTP/1.1"), (400,)),
    Raw("a request, then a WebSocket", ONE + SOCKET_GET + b"\r\n", (200,), 1),
    Raw("a request, then two lengths", ONE + post(LENGTH + LENGTH, BODY), (200,), 1),
    Raw("two requests, then a bad chunk", ONE + ONE + post(CHUNKED, b"ZZ\r\n"), (200, 200), 2),
]  # fmt: skip
