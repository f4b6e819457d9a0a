"""uvicorn's HTTP protocol, which also notifies a request of its caller's disconnect, and enforces bounds.

ASGI has one way to learn of a disconnect: a task of its own that waits in ``receive()``. Making and
cancelling one for each request costs more than everything else that uvicorn does for it, and the protocol
knows it anyway.

A connection that costs the gateway something and serves no request is closed: one over the limit, one whose
headers are too long or do not arrive, one whose body is no longer read, one that does not read its answer.
"""

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

    Bounds: ``stall_s`` while the caller reads nothing, ``head_s`` from a request's first byte to the end of
    its headers, ``linger_s`` for the rest of a body after the answer, ``max_connections`` of the process.
    """

    stall_s: ClassVar[float] = STALL_S
    head_s: ClassVar[float] = HEAD_TIMEOUT_S
    linger_s: ClassVar[float] = BODY_TIMEOUT_S
    max_connections: ClassVar[int] = MAX_CONNECTIONS
    _disconnect: ClientDisconnect
    _stall_timer: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    # Of the request whose headers are arriving: bytes received, and bytes parsed.
    _head_seen = 0
    _head_bytes = 0
    # Between a request's first byte and its last; and until its headers are whole.
    _in_message = False
    _in_head = False
    _upgraded = False
    _refusal = _NOT_HTTP

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """A caller has connected."""
        super().connection_made(transport)
        self._disconnect = ClientDisconnect()
        if len(self.connections) > self.max_connections:
            self._refuse(_TOO_MANY)
            return
        # A connection without a first request is idle, as one between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """The caller has disconnected."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._cancel_stall_timer()
        self._cancel_head_timer()
        self._disconnect.set(ClientGone)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.transport.is_closing() or self._upgraded or not (self._in_head or self._idle):
            return
        # The parser does not report a header that never ends, nor empty lines before a request: so bytes that
        # are not parsed yet count too.
        self._head_seen += len(data)
        if self._head_seen > MAX_HEAD_BYTES:
            self._refuse(_HEAD_TOO_LARGE)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_s, self._refuse, _HEAD_TOO_SLOW)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_message, self._in_head, self._head_bytes = True, True, 0
        cast("dict[str, object]", self.scope)[SCOPE_KEY] = self._disconnect

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are complete."""
        self._in_head, self._head_seen = False, 0
        self._cancel_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request's body is complete."""
        self._in_message = False
        self._cancel_head_timer()
        super().on_message_complete()
        if not self.pipeline:
            # A large body pauses reading, and a paused connection does not notice a disconnect.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """The answer is sent; the rest of an unread body may follow for a while."""
        super().on_response_complete()
        if self._in_message and not self._in_head and not self.transport.is_closing():
            self._cancel_head_timer()
            self._head_timer = self.loop.call_later(self.linger_s, self.transport.abort)

    def pause_writing(self) -> None:
        """The caller reads nothing."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.stall_s, self._abort_stalled)

    def resume_writing(self) -> None:
        """The caller reads again."""
        super().resume_writing()
        self._cancel_stall_timer()

    def timeout_keep_alive_handler(self) -> None:
        """The connection was idle for too long; bytes that the caller has not read are dropped."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or too much of it, in the gateway's own shape."""
        refusal, self._refusal = self._refusal, _NOT_HTTP
        self._refuse(refusal)

    def handle_websocket_upgrade(self) -> None:
        """From here on the connection belongs to another protocol."""
        self._upgraded = True
        super().handle_websocket_upgrade()

    @property
    def _idle(self) -> bool:
        return not self._in_message and (self.cycle is None or self.cycle.response_complete)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refusal = _HEAD_TOO_LARGE
            raise _HeadTooLarge

    def _refuse(self, error: PublicError) -> None:
        """Answer without the application, and end the connection.

        A request whose body was still arriving ends. While an earlier one is in progress no answer can be
        sent, and it ends too.
        """
        self._cancel_head_timer()
        self._unset_keepalive_if_required()
        cycle: RequestResponseCycle | None = self.cycle
        unfinished = self._in_message and not self._in_head and not self.pipeline
        if unfinished and cycle is not None and not cycle.response_started:
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
            if error.retry_after_s is not None:
                headers.append((b"retry-after", b"%d" % error.retry_after_s))
            lines = [STATUS_LINE[status], *(b"%b: %b\r\n" % header for header in headers), b"\r\n", body]
            self.transport.write(b"".join(lines))
        self.transport.close()

    def _abort_stalled(self) -> None:
        """The caller reads nothing: notify the request in progress, and drop what waits to be sent."""
        self._disconnect.set(ReaderTooSlow)
        self.transport.abort()

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
