"""uvicorn's WebSocket protocol with bounds for the handshake, for fragments, and for slow readers."""

import asyncio
import logging
from asyncio.transports import BaseTransport
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar, Final, cast

from starlette.types import Scope
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from gateway.errors import GatewayError
from gateway.http.disconnect_watch import STALL_S
from gateway.http.exchange import Exchange
from gateway.http.security import HEAD_TIMEOUT_S
from gateway.requests.body_memory import UNCOUNTED_BYTES

MAX_FRAGMENTS: Final = 1_024
"""Most frames of one message. A fragment of one byte takes about 50 bytes of memory."""
_log = logging.getLogger("gateway.websocket")
# The gateway reports each request itself, and uvicorn's log lines would contain the query string.
_log.setLevel(logging.WARNING)


class SocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket. ``on_lost`` is called when it is closed."""

    handshake_s: ClassVar[float] = HEAD_TIMEOUT_S
    stall_s: ClassVar[float] = STALL_S
    on_lost: Callable[[], None] | None = None
    # Limits the handshake, later the closing.
    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _log

    def connection_made(self, transport: BaseTransport) -> None:
        """The HTTP protocol hands its connection over."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.handshake_s, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def start_keepalive(self) -> None:
        """The handshake is complete."""
        self._cancel_timers()
        super().start_keepalive()

    async def receive(self) -> ASGIReceiveEvent:
        """The peer's next event; waits while the peer does not read what is sent to it."""
        await self.writable.wait()
        return await super().receive()

    def pause_writing(self) -> None:
        """The peer reads nothing. Reading stops too, since each ping would add a pong to the unsent bytes."""
        super().pause_writing()
        self.transport.pause_reading()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived; they are dropped if the connection is closing."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.handshake_complete and not self.close_sent:
            self._has_room(len(self.conn.reader.buffer) + sum(map(len, self.frames)))

    def send_receive_event_to_app(self) -> None:
        """A message is complete."""
        if not self._has_room(sum(map(len, self.frames))):
            return
        if self.curr_msg_data_type == "text" and not self.close_sent:
            self.frames = [b"".join(self.frames)]
            try:
                self.frames[0].decode()
            except UnicodeDecodeError:
                self.frames.clear()
                self.conn.fail(CloseCode.INVALID_DATA, "the frame is not UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_cont(self, event: Frame) -> None:
        """A further frame of a message."""
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.close_sent:
            self.frames.clear()
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} frames")
            self.handle_parser_exception()

    def handle_connect(self, event: Request) -> None:
        """The headers are complete. If the handshake is not valid, the HTTP protocol answers."""
        if self.conn.accept(event).status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            super().handle_connect(event)

    async def send(self, message: ASGISendEvent) -> None:
        """Send an event of the application; an HTTP answer instead of the handshake also completes it."""
        await super().send(message)
        if self.close_sent:
            self.handshake_complete = True

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """The application has ended; after ``stall_s`` a connection with unread data is closed."""
        super().on_task_complete(task)
        if not self.disconnected:
            self._timer = self.loop.call_later(self.stall_s, self.transport.abort)

    def _has_room(self, size: int) -> bool:
        """Count ``size`` bytes that have arrived as the request's body; ``False``: too many, and closed."""
        if size > UNCOUNTED_BYTES and not self.close_sent:
            try:
                Exchange.of(cast("Scope", self.scope)).hold_body(size)
            except GatewayError as full:
                self.frames.clear()
                self.conn.fail(CloseCode.TRY_AGAIN_LATER, full.message)
                self.handle_parser_exception()
                return False
        return True

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._stall_timer = None
