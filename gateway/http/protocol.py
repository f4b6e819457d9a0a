"""uvicorn's HTTP protocol, which also notifies a request of its caller's disconnect, and enforces bounds.

In ASGI, the only way to detect a disconnect is a separate task that waits in ``receive()``. Creating and
cancelling it costs more per request than everything else that uvicorn does, and the protocol knows of the
disconnect anyway.

A connection that uses resources without serving a request is closed: one over the limit, one whose headers
are too long or do not arrive, one whose body is no longer read, one whose peer does not read the answer.

A request that two servers could parse differently is refused, and the connection ends. llhttp refuses most of
them; this module refuses those that llhttp accepts against RFC 9110 and 9112.
"""

import asyncio
import re
import secrets
from collections.abc import Iterable
from typing import ClassVar, Final, NoReturn, cast

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.contracts.dialect import Header
from gateway.contracts.native_answer import error_json
from gateway.errors import PublicError
from gateway.http.body import BODY_TIMEOUT_S
from gateway.http.connections import PROBES, ConnectionTable
from gateway.http.disconnect_watch import STALL_S
from gateway.http.exchange import SCOPE_KEY, ClientDisconnect
from gateway.http.respond import error_reply
from gateway.http.security import HEAD_TIMEOUT_S, MAX_HEAD_BYTES, MAX_HEADERS, SECURITY_HEADERS
from gateway.http.socket_protocol import SocketProtocol

MAX_PIPELINED: Final = 16
"""Most requests of a connection that wait for an earlier answer; beyond them, nothing more is read."""
SURPLUS_HEAD_S: Final = 2.0  # longest time until the headers of a connection above the limits are complete
_FRAMING_PER_BYTE: Final = 16  # most bytes of chunk framing per byte of a body; a chunk of one byte has five


def _invalid(status: int, message: str) -> PublicError:
    return PublicError(status, "invalid_request", message)


_NOT_HTTP = _invalid(400, "the request is not valid HTTP/1.1")
_NO_HOST = _invalid(400, "the header host is missing; allowed: exactly one")
_BAD_HOST = _invalid(400, "the header host is not valid; allowed: a name or an address, and a port")
_NO_SOCKET = _invalid(
    400, "the upgrade to a WebSocket is refused; allowed: a GET without a body, by the rules of RFC 6455"
)
_VERSION = _invalid(505, "the version of HTTP is not supported; allowed: 1.0 and 1.1")
_CODING = _invalid(501, "transfer-encoding is not supported; allowed: chunked in HTTP/1.1")
_CHUNKS_TOO_LONG = _invalid(400, "the body's chunk headers are too long")
_HEAD_TOO_LARGE = PublicError(
    431,
    "headers_too_large",
    f"the request's headers are too large; allowed: {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes",
)
_HEAD_TOO_SLOW = _invalid(408, "the request's headers did not arrive in time")
_CHECKED: Final = frozenset(
    {
        b"authorization", b"x-api-key", b"api-key", b"host", b"content-length", b"transfer-encoding",
        b"expect", b"x-sluice-tenant", b"x-sluice-org", b"x-sluice-cache-salt",
    }
)  # fmt: skip
# Any other value must be refused (RFC 9112 §3.2).
_is_host = re.compile(rb"(?:\[[\w.:%-]+\]|[\w.~!$&'()*+,;=%-]*)(?::[0-9]*)?").fullmatch
_OF_BODY: Final = frozenset({b"content-length", b"transfer-encoding"})
# Headers that are removed from a request whose upgrade is ignored.
_OF_UPGRADE: Final = frozenset({b"upgrade", b"connection", b"http2-settings"})


def _head(status: int, headers: Iterable[Header]) -> bytes:
    return STATUS_LINE[status] + b"\r\n".join([*[b": ".join(header) for header in headers], b""])


class _Refused(Exception):
    """Raised in a callback to stop the parser."""


class _UnchunkedCycle(RequestResponseCycle):
    """A request in HTTP/1.0, which has no chunks (RFC 9112 §6.1): an answer without a length ends with the
    connection. uvicorn sends it in chunks.
    """

    _until_close = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self._until_close = not any(name == b"content-length" for name, _ in message.get("headers", ()))
            if self._until_close:
                self.chunked_encoding = False
        elif message["type"] == "http.response.body" and self._until_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class GatewayProtocol(HttpToolsProtocol):
    """One connection. Puts its :class:`ClientDisconnect` into the scope of each request.

    Bounds: ``stall_s`` while the caller reads nothing, ``head_s`` from a request's first byte to the end of
    its headers, ``linger_s`` for the rest of a body after the answer, ``table`` for open connections. A
    connection above its limits has ``surplus_head_s`` for its headers; on ``admin_port`` it is then served.
    Pages of ``cors_origins`` may read the protocol's own answers.
    """

    stall_s: ClassVar[float] = STALL_S
    head_s: ClassVar[float] = HEAD_TIMEOUT_S
    linger_s: ClassVar[float] = BODY_TIMEOUT_S
    surplus_head_s: ClassVar[float] = SURPLUS_HEAD_S
    admin_port: ClassVar[int | None] = None
    cors_origins: ClassVar[frozenset[str]] = frozenset()
    table: ClassVar[ConnectionTable] = ConnectionTable()
    _disconnect: ClientDisconnect
    # The request that the application is answering; ``cycle`` is the newest request.
    _running: RequestResponseCycle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    # On a connection above the limits: the error for all requests but probes.
    _surplus: PublicError | None = None
    # Bytes received, and bytes parsed, of the headers that are arriving.
    _head_seen = 0
    _head_bytes = 0
    _framing_bytes = 0  # bytes of chunk framing in the request's body, minus those allowed for its content
    # Whether a request has begun and is not complete; whether its headers are not complete.
    _in_message = False
    _in_head = False
    # If true, nothing more is read, and the connection ends after the answer to the last request.
    _ends_after_answer = False
    _refusal = _NOT_HTTP

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._disconnect = ClientDisconnect(self.flow, transport.write, self._begin)
        self._surplus = self.table.open(self, self.client[0] if self.client else "")
        if self._surplus is not None:
            self._head_timer = self.loop.call_later(self.surplus_head_s, self._refuse, self._surplus)
            return
        # A connection before its first request counts as idle, like one between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.close(self)
        if self._running is not None:
            # uvicorn only marks the newest request, which may still wait for this one's answer.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._cancel_stall_timer()
        self._cancel_head_timer()
        self._disconnect.set()

    def give_way(self) -> None:
        """Another connection takes the place of this one, which has no request in progress."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._ends_after_answer or self.transport.is_closing():
            return
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        unfinished = self.cycle if self._in_message and not self._in_head else None
        content = len(unfinished.body) if unfinished is not None else 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            refusal, self._refusal = self._refusal, _NOT_HTTP
            self._refuse(refusal)
            return
        if unfinished is not None and unfinished is self.cycle and self._in_message:
            self._count_framing(len(data), len(unfinished.body) - content)
        if not (self._in_head or self._idle):
            return
        if unfinished is not None:  # most of these bytes were the rest of a body, after its answer
            if self._idle:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
                return
            data = b""
        # Unparsed bytes count too: the parser reports neither a header that never ends nor empty lines before
        # a request.
        self._head_seen += len(data)
        if self._head_seen > MAX_HEAD_BYTES:
            self._refuse(_HEAD_TOO_LARGE)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_s, self._refuse, _HEAD_TOO_SLOW)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(_NOT_HTTP)
        super().on_message_begin()
        self._in_message, self._in_head, self._head_bytes = True, True, 0
        self.scope[SCOPE_KEY] = self._disconnect  # type: ignore[typeddict-unknown-key]  # ours

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._stop(_HEAD_TOO_LARGE)
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a field of the trailer, which counts towards the bounds and is dropped."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._stop(_HEAD_TOO_LARGE)
        if not self._in_head:
            return
        if len(self.headers) >= MAX_HEADERS:
            self._stop(_HEAD_TOO_LARGE)
        name = name.lower()
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._stop(_CODING)
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        seen: set[bytes] = set()
        version = self.parser.get_http_version()
        for name, value in self.headers:
            if name not in _CHECKED:
                continue
            if name == b"expect":
                # HTTP/1.0 has no interim answers (RFC 9110 §10.1.1).
                self.expect_100_continue = value.lower() == b"100-continue" and version != "1.0"
            elif name == b"host" and not _is_host(value.strip()):
                self._stop(_BAD_HOST)
            elif name in seen:  # servers differ in which of the two they use
                self._stop(_invalid(400, f"the header {name.decode()} is repeated; allowed: once"))
            seen.add(name)
        if version == "1.1":
            if b"host" not in seen:
                self._stop(_NO_HOST)
        elif version != "1.0":
            self._stop(_VERSION)
        elif b"transfer-encoding" in seen:
            self._stop(_CODING)
        if self._surplus is not None and not self._is_served_above_limits():
            self._stop(self._surplus)
        self._in_head, self._head_seen, self._framing_bytes = False, 0, 0
        if self._head_timer is not None:
            self._cancel_head_timer()
        if self.parser.should_upgrade():
            return  # `_upgrade` comes next
        table = self.table
        table.unused.pop(self, None)
        table.idle.pop(self, None)
        super().on_headers_complete()
        if version == "1.0":
            self.cycle.__class__ = _UnchunkedCycle  # uvicorn makes the object; its task has not run yet
            self._disconnect.begin = self._disconnect.write = None
        if not self.pipeline:
            self._running = self.cycle
        if self._surplus is not None or table.ending:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Keep a body that comes in one piece as it is; uvicorn would copy it, and so would its reader."""
        cycle = self.cycle
        held = cast("bytes | bytearray", cycle.body)
        if held or len(body) > HIGH_WATER_LIMIT or cycle.response_complete or self.parser.should_upgrade():
            if isinstance(held, bytes):
                cycle.body = bytearray(held)
            super().on_body(body)
        else:
            cycle.body = body  # type: ignore[assignment]  # its readers take either
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._in_message = False
        if self._head_timer is not None:
            self._cancel_head_timer()
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if self.flow.read_paused and not self.pipeline:
            # A large body pauses reading, and a disconnect is not noticed while reading is paused.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """The answer is sent; the caller has ``linger_s`` to send the rest of an unread body."""
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        elif self._ends_after_answer:
            self.transport.close()
        super().on_response_complete()
        if self.transport.is_closing():
            self._bound_close()
            return
        if self.timeout_keep_alive_task is not None:
            self.table.idle[self] = None
        if self._in_message and not self._in_head:
            self._cancel_head_timer()
            self._head_timer = self.loop.call_later(self.linger_s, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.stall_s, self._abort_stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stall_timer()

    def timeout_keep_alive_handler(self) -> None:
        """The connection was idle for too long; unsent bytes are dropped."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _begin(self, status: int, headers: Iterable[Header], data: bytes, more: bool) -> bool:
        """Send the head of an answer and the first piece of its body in one write, where uvicorn makes two.

        Returns ``False`` if uvicorn must do it: then nothing was sent.
        """
        cycle = self._running
        if cycle is None or cycle.response_started or cycle.disconnected or self.flow.write_paused:
            return False
        if cycle.scope["method"] == "HEAD":
            return False
        sent = [*cycle.default_headers, *headers]
        if not cycle.keep_alive:
            sent.append((b"connection", b"close"))
        if more:
            sent.append((b"transfer-encoding", b"chunked"))
        head = _head(status, sent)
        if head.count(b"\n") != 1 + len(sent):  # uvicorn refuses a line break in a header
            return False
        cycle.response_started, cycle.chunked_encoding = True, more
        cycle.waiting_for_100_continue = False
        if more:
            self.transport.write(b"%b\r\n%x\r\n%b\r\n" % (head, len(data), data))
            return True
        self.transport.write(b"%b\r\n%b" % (head, data))
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    @property
    def _idle(self) -> bool:
        return not self._in_message and (self.cycle is None or self.cycle.response_complete)

    def _stop(self, refusal: PublicError) -> NoReturn:
        """Stop the parser; :meth:`data_received` then answers with ``refusal``."""
        self._refusal = refusal
        raise _Refused

    def _count_framing(self, received: int, content: int) -> None:
        """Count the bytes of chunk framing, and refuse the request if there are too many."""
        if not self.cycle.response_complete:
            self._framing_bytes = max(0, self._framing_bytes + received - (1 + _FRAMING_PER_BYTE) * content)
            if self._framing_bytes > MAX_HEAD_BYTES:
                self._refuse(_CHUNKS_TOO_LONG)

    def _is_served_above_limits(self) -> bool:
        if self.server is not None and self.admin_port is not None and self.server[1] == self.admin_port:
            return True
        return self.url.partition(b"?")[0] in PROBES

    def _upgrade(self, rest: bytes) -> None:
        """Handle an upgrade: to a WebSocket, or to a protocol that is ignored (RFC 9110 §7.8).

        ``rest`` are the bytes after the headers, which the parser leaves to the other protocol.
        """
        version = self.parser.get_http_version()
        method = self.parser.get_method()
        wanted = self._get_upgrade()
        if method == b"CONNECT":
            self._refuse(_NOT_HTTP)
        elif wanted == b"websocket":
            bare = not rest and not any(name in _OF_BODY for name, _ in self.headers)
            if method != b"GET" or version != "1.1" or not bare or not self._idle:
                self._refuse(_NO_SOCKET)
                return
            self._cancel_stall_timer()
            self.scope["method"] = "GET"
            self.handle_websocket_upgrade()
            socket = self.transport.get_protocol()
            if isinstance(socket, SocketProtocol):
                socket.on_lost = lambda: self.table.close(self)
                self.table.unused.pop(self, None)
                self.table.idle.pop(self, None)
                if not socket.handshake_initiated:
                    self._refuse(_NO_SOCKET)
        else:
            kept = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] not in _OF_UPGRADE]
            line = b"%b %b HTTP/%b\r\n" % (method, self.url, version.encode())
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(b"".join([line, *kept, b"\r\n", rest]))

    def _refuse(self, error: PublicError) -> None:
        """Answer without the application, and end the connection.

        A request whose body is still arriving ends. Earlier requests are still answered; then the connection
        ends without another answer.
        """
        self._cancel_head_timer()
        self._unset_keepalive_if_required()
        self._ends_after_answer = True
        cycle: RequestResponseCycle | None = self.cycle
        if self._in_message and not self._in_head and cycle is not None and not cycle.response_complete:
            if self.pipeline:
                self.pipeline.popleft()
                return
            if cycle.response_started:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        elif cycle is not None and not cycle.response_complete:
            return
        request_id = f"req_{secrets.token_hex(10)}"
        reply = error_reply(error, request_id, error_json)
        headers = [
            (b"content-type", reply.content_type),
            (b"content-length", str(len(reply.body)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", request_id.encode()),
            (b"x-trace-id", secrets.token_hex(16).encode()),
            *SECURITY_HEADERS,
            *reply.headers,
            *self._cors_headers(),
        ]
        self.transport.write(b"%b\r\n%b" % (_head(reply.status, headers), reply.body))
        self.transport.close()
        self._bound_close()

    def _cors_headers(self) -> list[Header]:
        origin = next((value for name, value in self.headers or () if name == b"origin"), None)
        if origin is None or self.cors_origins.isdisjoint(("*", origin.decode("latin-1"))):
            return []
        return [
            (b"access-control-allow-origin", b"*" if "*" in self.cors_origins else origin),
            (b"access-control-expose-headers", b"*"),
            (b"vary", b"Origin"),
        ]

    def _bound_close(self) -> None:
        """Limit the time for which bytes that the caller does not read keep a closing connection open."""
        if self._stall_timer is None and self.transport.get_write_buffer_size():
            self._stall_timer = self.loop.call_later(self.stall_s, self.transport.abort)

    def _abort_stalled(self) -> None:
        """The caller reads nothing: notify the request in progress, and drop what waits to be sent."""
        self._disconnect.set()
        self.transport.abort()

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
