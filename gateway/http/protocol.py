"""uvicorn's HTTP protocol, which also tells the request in progress when its caller leaves, and keeps bounds.

ASGI has one way to learn that a caller has left: a task of its own that waits in ``receive()``. Making and
cancelling one for each request costs more than all else that uvicorn does for it, and the protocol knows it
anyway.

A connection that costs the gateway something and gives nothing is ended: one too many, one whose headers are
too long or do not come, one that sends a body that nobody waits for, one that does not take its answer.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import ClassVar, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.contracts.native_answer import error_json
from gateway.errors import PublicError
from gateway.http.body import BODY_TIMEOUT_S
from gateway.http.client_disconnect import SCOPE_KEY, ClientDisconnect, ClientGone, ReaderTooSlow
from gateway.http.disconnect_watch import STALL_S
from gateway.http.security import (
    HEAD_TIMEOUT_S,
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    SECURITY_HEADERS,
)

_NOT_HTTP = PublicError(400, "invalid_request", "the request is not valid HTTP/1.1")
_HEAD_TOO_LARGE = PublicError(
    431,
    "headers_too_large",
    f"the request's headers are too large; allowed: {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes",
)
_HEAD_TOO_SLOW = PublicError(408, "invalid_request", "the request's headers did not arrive in time")
_TOO_MANY = PublicError(503, "queue_full", "there are too many connections", retry_after_ms=1_000)


class _HeadTooLarge(Exception):
    """Stops the parser."""


class GatewayProtocol(HttpToolsProtocol):
    """One connection. Puts its :class:`ClientDisconnect` into the scope of each request.

    Attributes:
        stall_s: longest time, in seconds, that the caller may take no bytes while some wait for it.
        head_s: longest time, in seconds, from a request's first byte to the end of its headers.
        linger_s: longest time, in seconds, that the rest of a body may take behind the answer.
        max_connections: connections of this process at once.
    """

    stall_s: ClassVar[float] = STALL_S
    head_s: ClassVar[float] = HEAD_TIMEOUT_S
    linger_s: ClassVar[float] = BODY_TIMEOUT_S
    max_connections: ClassVar[int] = MAX_CONNECTIONS
    _departure: ClientDisconnect
    _stalled: asyncio.TimerHandle | None = None
    _overdue: asyncio.TimerHandle | None = None
    # Of the request whose headers are coming: bytes seen, and bytes and number of what was parsed.
    _head_seen = 0
    _head_bytes = 0
    # Between a request's first byte and its last; and until its headers are whole.
    _in_message = False
    _in_head = False
    _upgraded = False
    _refusal = _NOT_HTTP

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """The caller is there."""
        super().connection_made(transport)
        self._departure = ClientDisconnect()
        if len(self.connections) > self.max_connections:
            self._refuse(_TOO_MANY)
            return
        # Who says nothing at all is idle, as between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """The caller has left."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._on_the_move()
        self._in_time()
        self._departure.left(ClientGone)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.transport.is_closing() or self._upgraded or not (self._in_head or self._idle):
            return
        # One header that never ends is not told by the parser, nor are empty lines before a request: so what
        # is not parsed yet counts too.
        self._head_seen += len(data)
        if self._head_seen > MAX_HEAD_BYTES:
            self._refuse(_HEAD_TOO_LARGE)
        elif self._overdue is None:
            self._overdue = self.loop.call_later(self.head_s, self._refuse, _HEAD_TOO_SLOW)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_message, self._in_head, self._head_bytes = True, True, 0
        cast("dict[str, object]", self.scope)[SCOPE_KEY] = self._departure

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        self._grown(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._grown(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are here."""
        self._in_head, self._head_seen = False, 0
        self._in_time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request's body is here."""
        self._in_message = False
        self._in_time()
        super().on_message_complete()
        if not self.pipeline:
            # A large body stops the reading, and who does not read does not see the caller leave.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """The answer is out; the rest of a body that nobody reads may follow for a while."""
        super().on_response_complete()
        if self._in_message and not self._in_head and not self.transport.is_closing():
            self._in_time()
            self._overdue = self.loop.call_later(self.linger_s, self.transport.abort)

    def pause_writing(self) -> None:
        """The caller takes no bytes."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.stall_s, self._give_up)

    def resume_writing(self) -> None:
        """The caller takes bytes again."""
        super().resume_writing()
        self._on_the_move()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came for long; what the caller has not taken until now is not waited for."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP, or too much of it, is answered in our own shape."""
        refusal, self._refusal = self._refusal, _NOT_HTTP
        self._refuse(refusal)

    def handle_websocket_upgrade(self) -> None:
        """The connection is another protocol's from here on."""
        self._upgraded = True
        super().handle_websocket_upgrade()

    @property
    def _idle(self) -> bool:
        return not self._in_message and (self.cycle is None or self.cycle.response_complete)

    def _grown(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refusal = _HEAD_TOO_LARGE
            raise _HeadTooLarge

    def _refuse(self, error: PublicError) -> None:
        """Answer without the application, and end the connection.

        A request whose body was still coming is over. While an earlier one is in progress nothing can be
        said, and it ends too.
        """
        self._in_time()
        self._unset_keepalive_if_required()
        cycle: RequestResponseCycle | None = self.cycle
        broken_off = self._in_message and not self._in_head and not self.pipeline
        if broken_off and cycle is not None and not cycle.response_started:
            cycle.disconnected = True
            cycle.message_event.set()
            cycle = None
        if cycle is None or cycle.response_complete:
            request_id = f"req_{secrets.token_hex(10)}"
            status, body = error_json(error, request_id)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
                (b"x-request-id", request_id.encode()),
                (b"x-trace-id", secrets.token_hex(16).encode()),
                *SECURITY_HEADERS,
            ]
            if error.retry_after_ms is not None:
                headers.append((b"retry-after", b"%d" % -(-error.retry_after_ms // 1000)))
            lines = [STATUS_LINE[status], *(b"%b: %b\r\n" % header for header in headers), b"\r\n", body]
            self.transport.write(b"".join(lines))
        self.transport.close()

    def _give_up(self) -> None:
        """The caller takes nothing: whoever works for it hears of it, and what waits for it is dropped."""
        self._departure.left(ReaderTooSlow)
        self.transport.abort()

    def _on_the_move(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _in_time(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
