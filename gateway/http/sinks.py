"""Where the journey's events go: one whole answer, server-sent events, or a WebSocket."""

from __future__ import annotations

from typing import Final

import orjson

from gateway.backends.port import Delta
from gateway.contracts.dialect import Frames
from gateway.contracts.native_answer import done_event, error_event
from gateway.contracts.values import Answer
from gateway.errors import PublicError
from gateway.http.exchange import EVENT_STREAM, Exchange
from gateway.http.respond import ErrorShape, error_reply

_STREAM_HEADERS: Final = (
    (b"content-type", EVENT_STREAM),
    (b"x-accel-buffering", b"no"),  # proxies that buffer answers would hold tokens back
)


class WholeSink:
    """Keeps the end of the journey, to be sent as one body when it is over."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.error: PublicError | None = None

    @property
    def ended(self) -> bool:
        """Whether the journey has said how it ended."""
        return self.answer is not None or self.error is not None

    async def delta(self, delta: Delta) -> None:
        """Dropped: the answer holds all of the text."""

    async def finish(self, answer: Answer) -> None:
        """Keep the answer."""
        self.answer = answer

    async def fail(self, error: PublicError, *, request_id: str, trace_id: str) -> None:
        """Keep the error."""
        self.error = error


class StreamSink:
    """Server-sent events; 200 goes out with the first one, so an earlier failure has its own status."""

    def __init__(self, exchange: Exchange, frames: Frames, shape: ErrorShape) -> None:
        self._exchange = exchange
        self._frames = frames
        self._shape = shape
        self._open = False
        self.ended = False

    async def delta(self, delta: Delta) -> None:
        """Send one event; a delta without text and log-probabilities is none."""
        if delta.text or delta.logprobs:
            data = self._frames.delta(delta.text, delta.index, delta.logprobs)
            if not self._open:
                data = await self._opened(data)
            await self._exchange.send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, answer: Answer) -> None:
        """Send the last events and end the response."""
        self.ended = True
        data = self._frames.finish(answer)
        if not self._open:
            data = await self._opened(data)
        await self._exchange.body(data, more=False)

    async def fail(self, error: PublicError, *, request_id: str, trace_id: str) -> None:
        """Before the first event an HTTP error, afterwards an event."""
        self.ended = True
        if self._open:
            await self._exchange.body(self._frames.fail(error, request_id, partial=True), more=False)
        else:
            await self._exchange.reply(error_reply(error, request_id, self._shape))

    async def _opened(self, data: bytes) -> bytes:
        self._open = True
        await self._exchange.start(200, _STREAM_HEADERS)
        return self._frames.opening + data


class SocketSink:
    """The native stream's objects as text frames of an accepted WebSocket."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._partial = False
        self.ended = False

    async def delta(self, delta: Delta) -> None:
        """Send one ``token`` event; a delta without text is none."""
        if delta.text:
            self._partial = True
            await self._text('{"type":"token","delta":' + orjson.dumps(delta.text).decode() + "}")

    async def finish(self, answer: Answer) -> None:
        """Send the ``done`` event."""
        self.ended = True
        await self._text(done_event(answer).decode())

    async def fail(self, error: PublicError, *, request_id: str, trace_id: str) -> None:
        """Send the ``error`` event."""
        self.ended = True
        await self._text(error_event(error, request_id, partial=self._partial).decode())

    async def _text(self, text: str) -> None:
        await self._exchange.send({"type": "websocket.send", "text": text})
