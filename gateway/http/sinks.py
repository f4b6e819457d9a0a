"""Sinks for the journey's events: one whole answer, server-sent events, or a WebSocket."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Final

import orjson
from msgspec import Struct
from websockets.frames import CloseCode

from budgeting.values import Plan
from gateway.contracts.answer import Answer
from gateway.contracts.dialect import ContractDialect, Frames, Header, ParsedRequest
from gateway.contracts.events import TAKEN, Delta
from gateway.contracts.native_answer import answer_event, done_event, error_event
from gateway.errors import PublicError
from gateway.http.exchange import EVENT_STREAM, Exchange
from gateway.http.respond import error_reply

STREAM_HEADERS: Final = (
    (b"content-type", EVENT_STREAM),
    (b"x-accel-buffering", b"no"),  # without it, proxies that buffer answers would delay tokens
)


class WholeSink(Struct, eq=False):
    """Stores the end of the journey, and sends it with ``send``, if given."""

    send: Callable[[Answer | PublicError], Awaitable[None]] | None = None
    end: Answer | PublicError | None = None
    ended: bool = False
    discarded: ClassVar[bool] = False

    def planned(self, plan: Plan, model: str) -> None:
        """Ignore the plan: the answer contains its report."""

    async def delta(self, delta: Delta) -> None:
        """Ignore the piece: the answer contains the whole text."""

    async def finish(self, answer: Answer | PublicError) -> None:
        self.end = answer
        if self.send is not None:
            await self.send(answer)
        self.ended = True

    async def fail(self, error: PublicError) -> None:
        await self.finish(error)


PING_CHECK_S: Final = 5.0
PING_AFTER_CHECKS: Final = 2
"""A silent stream gets a ping after 10 to 15 s. Proxies close silent connections; nginx does after 60 s."""


Keep = Callable[[ParsedRequest, Frames, Answer], Awaitable[None]]  # stores an answer before its end is sent


class StreamSink:
    """Sends server-sent events; 200 is sent with the first one, so an earlier failure has its own status.

    If the contract has pings, the first ping of :meth:`keep_alive` may also begin the answer.
    """

    discarded = False

    def __init__(
        self, exchange: Exchange, dialect: ContractDialect, asked: ParsedRequest, keep: Keep
    ) -> None:
        self._keep = keep
        self._exchange = exchange
        self._dialect = dialect
        self._asked = asked
        self._use(dialect.frames(asked))
        self._headers: Sequence[Header] = ()
        self._planned: tuple[str, Plan] | None = None
        self._open = False
        self._silent = True  # whether nothing was sent since the last check of keep_alive
        self._pinging: asyncio.Event | None = None
        self._unsent = b""  # what is on its way; a deadline may end the wait for the headers or a slow reader
        self.ended = False

    def planned(self, plan: Plan, model: str) -> None:
        """Set the headers, which report what the prompt leaves out, and the model that events name."""
        if not self._open:
            self._headers = self._dialect.headers(plan)
            self._planned = model, plan
            self._use(self._dialect.frames(self._asked, model, plan))

    def _use(self, frames: Frames) -> None:
        self._frames = frames
        self._around = frames.around

    def delta(self, delta: Delta) -> Awaitable[None]:
        """Send one event; nothing if it has no text, log-probabilities or requested token ids."""
        if not self._open and delta.cached_tokens and self._planned is not None:
            self._use(self._dialect.frames(self._asked, *self._planned, delta.cached_tokens))
        around, plain = self._around, delta.__class__ is Delta
        if around is not None and plain and delta.text and not (delta.index or delta.logprobs):
            data = around[0] + orjson.dumps(delta.text) + around[1]  # without a call a token
        elif not plain:
            data = self._frames.event(delta)
        elif (
            delta.text
            or delta.logprobs
            or (delta.token_ids and self._asked.token_ids)
            or (delta.tokens and self._asked.running_usage)
        ):
            data = self._frames.delta(delta)
        else:
            return TAKEN
        if not data:
            return TAKEN
        if self._open and self._pinging is None and not self._unsent:
            self._silent = False  # does what _send does, without a coroutine
            if self._exchange.write(data):
                return TAKEN
        self._unsent += data
        return self._send()

    @property
    def pings(self) -> bool:
        return bool(self._frames.ping)

    async def keep_alive(self) -> None:
        """Send a ping whenever the stream was silent; runs concurrently with the journey until cancelled."""
        quiet = 0
        while True:
            await asyncio.sleep(PING_CHECK_S)
            # A send in progress is not silence: the client reads slowly, or the headers are being made.
            busy = self._exchange.sending_since is not None or self._open is not self._exchange.started
            quiet, self._silent = quiet + 1 if self._silent and not busy else 0, True
            if quiet < PING_AFTER_CHECKS or self.ended:
                continue
            quiet = 0
            self._pinging = asyncio.Event()
            try:
                await self._piece(self._frames.ping, more=True)
            finally:
                self._pinging.set()
                self._pinging = None

    async def _send(self) -> None:
        if self._pinging is not None:
            await self._pinging.wait()
        self._silent = False
        sent = False
        try:
            await self._piece(self._unsent, more=True)
            sent = True
        finally:
            if sent or (self._open and not self._exchange.waits_first):
                self._unsent = b""

    async def finish(self, answer: Answer) -> None:
        await self._end()
        await self._keep(self._asked, self._frames, answer)
        await self._piece(self._unsent + self._frames.finish(answer), more=False)

    async def fail(self, error: PublicError) -> None:
        await self._end()
        request_id = self._exchange.request_id
        if self._open:
            await self._exchange.body(self._frames.fail(error, request_id), more=False)
        else:
            await self._exchange.reply(error_reply(error, request_id, self._dialect.error))

    async def _end(self) -> None:
        self.ended = True
        if self._pinging is not None:
            await self._pinging.wait()

    async def _piece(self, data: bytes, *, more: bool) -> None:
        if not self._open:
            self._open = True
            headers = (*STREAM_HEADERS, *self._headers)
            try:
                await self._exchange.begin(200, headers, self._frames.opening + data, more=True)
            finally:
                self._open = self._exchange.started  # not if it was cancelled before
            if more:
                return
            data = b""
        await self._exchange.body(data, more=more)


class SocketSink:
    """Sends the native stream's objects as text frames of an accepted WebSocket.

    The close frame, with ``close_code``, follows the last event at once, so that a server that stops once all
    requests have ended has no open socket.
    """

    discarded = False

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._partial = False
        self._unsent: list[str] = []  # what a deadline stopped on its way
        self.close_code = CloseCode.NORMAL_CLOSURE
        self.ended = False

    def planned(self, plan: Plan, model: str) -> None:
        """Ignore the plan: the ``done`` event contains its report."""

    async def delta(self, delta: Delta) -> None:
        """Send one event; nothing if its text is empty."""
        if delta.__class__ is not Delta:
            self._partial = True
            await self._text(answer_event(delta).decode())
        elif delta.text:
            self._partial = True
            await self._text('{"type":"token","delta":' + orjson.dumps(delta.text).decode() + "}")

    async def finish(self, answer: Answer) -> None:
        await self._last(done_event(answer))

    async def fail(self, error: PublicError) -> None:
        await self._last(error_event(error, self._exchange.request_id, partial=self._partial))

    async def _last(self, event: bytes) -> None:
        self.ended = True
        await self._text(event.decode())
        await self._exchange.send({"type": "websocket.close", "code": self.close_code})

    async def _text(self, text: str) -> None:
        try:
            while self._unsent:
                await self._exchange.send({"type": "websocket.send", "text": self._unsent[0]})
                del self._unsent[0]
            await self._exchange.send({"type": "websocket.send", "text": text})
        except asyncio.CancelledError:
            if self._exchange.waits_first:
                self._unsent.append(text)
            raise
