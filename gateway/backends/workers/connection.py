"""One HTTP/1.1 connection to a worker: one request at a time, the body read in pieces as received.

The transport's callbacks append to a buffer and wake the reader, which takes the whole buffer: a burst of
events costs one turn of the loop. With :meth:`Connection.pass_on` the callback itself hands over the pieces
and does not wake the reader: a token costs no turn of the loop at all. One timer serves all timeouts of a
request; pieces do not rearm it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import cast

import httptools

from gateway.backends.workers.errors import BadHttp, ConnectionLost, TimedOut, TransportError

HIGH_WATER_BYTES = 512 * 1024  # unread bytes above which reading is paused: some 2,000 events of a stream
MAX_HEAD_BYTES = 64 * 1024  # longest head of an answer, bytes
# The most pieces that are kept until they are passed on together: about the tokens that a vLLM sends as one
# piece when the caller does not stream (``dialect.STREAM_INTERVAL``).
GATHERED_PIECES = 32
LAST_EVENT = b"[DONE]"
# How long a connection may take to end an answer whose last event has come, before it is closed.
LINGER_S = 1.0


class Connection(asyncio.Protocol):
    """Serves one exchange after another.

    Its methods in order: :meth:`send`, :meth:`wait` until ``head_done``, :meth:`read`, :meth:`release`.

    Args:
        made: called once, when the connection is made.
        free: called when the connection can take another request.
        gone: called at :meth:`close`, and when the connection has closed.
    """

    # CPython keeps more than 29 attributes in a dict, which takes longer to make and to read.
    __slots__ = (
        "_answer_headers", "_body", "_buffered", "_done", "_error", "_first_by", "_free", "_full",
        "_gathers", "_gone", "_head_bytes", "_headers", "_keeps_alive", "_last_at", "_limits", "_lingering",
        "_loop", "_made", "_parser", "_partly_sent", "_paused", "_served", "_take", "_timer", "_timer_at",
        "_total_by", "_transport", "_waiter", "busy", "content_type", "head_done", "idle_since", "on_body",
        "on_header", "status",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        made: Callable[[Connection], None],
        free: Callable[[Connection], None],
        gone: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._made = made
        self._free = free
        self._gone = gone
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None  # pieces go to it while it is set
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        # Set by each exchange: its limits, and the times of the next ones and of the last bytes.
        self._limits = (0.0, 0.0, 0.0)
        self._first_by: float | None = None
        self._total_by = self._last_at = 0.0
        self._error: TransportError | None = None
        self._served = 0
        self.busy = False
        self.idle_since = 0.0
        self._body: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        # The parser calls these with each header, and each piece of a body: one per token.
        self.on_header = self._headers.__setitem__
        self.on_body = self._body.append
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._body.clear()
        self._headers.clear()
        self._gathers = False
        self._buffered = 0  # bytes received since the last read
        self._head_bytes = 0
        self.head_done = False  # whether the head of the answer was received
        self._keeps_alive = False
        self._done = False
        self._paused = False
        self._full = False  # whether the transport's write buffer is full
        self._partly_sent = False
        self._lingering = False
        self.status = 0
        self.content_type = ""
        self._answer_headers: dict[bytes, bytes] = {}

    # The methods of an exchange, in the order of the calls.

    def send(self, request: Sequence[bytes], limits: tuple[float, float, float]) -> None:
        """Send a whole request. Raises ConnectionLost when the connection closed while it was idle.

        Args:
            request: head and body, in one piece or several.
            limits: longest time until :meth:`first_token_received` is called, longest time without a byte
                after that, and longest time of the exchange, seconds.
        """
        if self._error is not None or self._transport is None or self._transport.is_closing():
            raise ConnectionLost("closed while idle", untouched=True)
        self._reset()
        self.busy = True
        now = self._loop.time()
        self._limits = limits
        self._last_at, self._first_by, self._total_by = now, now + limits[0], now + limits[2]
        self._arm(now + min(limits))
        for piece in request:
            self._transport.write(piece)

    async def send_more(self, pieces: AsyncGenerator[bytes | memoryview]) -> None:
        """Send the rest of a request, no faster than the worker takes it.

        Sending stops if the worker answers before it has everything; :meth:`release` then closes the
        connection. Raises TransportError.
        """
        self._partly_sent = True
        async with aclosing(pieces):
            async for piece in pieces:
                while self._full and not self.head_done:
                    await self.wait()
                if self._error is not None:
                    raise self._error
                if self.head_done or self._transport is None:
                    return
                self._transport.write(piece)
                await asyncio.sleep(0)  # let other tasks run: a fast worker never makes this loop wait
        self._partly_sent = False

    def header(self, name: bytes) -> str:
        """A header of the answer by its name in lower case; empty when the answer has none of that name."""
        return self._answer_headers.get(name, b"").decode("latin-1")

    async def read(self) -> bytes:
        """The body received since the last call; empty at its end. Raises TransportError."""
        while not self._body:
            if self._done:
                return b""
            await self.wait()
        return self._taken()

    def _taken(self) -> bytes:
        data = b"".join(self._body)
        self._body.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def pass_on(self, take: Callable[[bytes], bool]) -> bool:
        """Give each piece of the body to ``take`` as it arrives, until ``take`` returns False.

        ``take`` runs in the transport's callback: it must not wait or raise. Returns whether more of the body
        follows. Raises TransportError.
        """
        if not self._body or take(self._taken()):
            self._take = take
            try:
                while self._take is not None and not self._done:
                    await self.wait()
            finally:
                if self._take is not None and self._body:
                    take(self._taken())
                self._take = None
        return not self._done or bool(self._body)

    def gather(self) -> None:
        """Pass further pieces of this body on together, at the latest when nothing more will come."""
        self._gathers = True

    def heard_since(self, at: float) -> bool:
        """Whether bytes of an answer have come since then, by the event loop's clock."""
        return self._last_at >= at and self._head_bytes > 0

    def first_token_received(self) -> None:
        """Note that the first token has come: from then on only the idle and total timeouts apply."""
        self._first_by = None

    def release(self) -> None:
        """End the exchange. If the answer is unfinished the connection closes, which the worker notices.

        After :meth:`linger` the connection stays open for the end of the body.
        """
        if not self.busy:
            return
        whole = self._done and self._error is None
        if whole and self._keeps_alive and not self._partly_sent:
            self.busy = False
            self._served += 1
            self.idle_since = self._loop.time()
            self._free(self)
        elif whole or self._error is not None or not self._lingering:
            self.close()

    def linger(self) -> None:
        """Wait in the background for the end of the body, since the answer is complete."""
        self._lingering = True
        if not self._done:
            self._first_by, self._total_by = None, self._loop.time() + LINGER_S
            self._arm(self._total_by)

    def give_up(self, silent_s: float) -> None:
        """Fail an exchange in which the worker owes bytes and has sent none for ``silent_s``."""
        owed = self.busy and not (self._partly_sent or self._lingering or self._unread or self._done)
        if owed and self._loop.time() - self._last_at >= silent_s:
            self._fail(TimedOut("nothing came", silent_s))

    def close(self) -> None:
        """Close at once, without sending what is still buffered."""
        self._disarm()
        if self._error is None:
            self._error = ConnectionLost("closed here")
        self.busy = False
        if self._transport is not None:
            self._transport.abort()
            self._gone(self)

    # The transport's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._made(self)

    def data_received(self, data: bytes) -> None:
        if not self.busy or self._done:
            # Bytes outside an exchange: the two sides disagree on where an answer ends.
            self._fail(BadHttp("bytes outside of an answer"))
            return
        self._last_at = self._loop.time()
        if not self.head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(BadHttp("the worker asks for a protocol upgrade"))
        except httptools.HttpParserError:
            self._fail(BadHttp("the answer is not HTTP"))
        if self.head_done:
            if self._headers:
                self._headers.clear()  # trailers are not stored
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._fail(BadHttp(f"the answer's head is longer than {MAX_HEAD_BYTES} bytes"))
        if self._take is not None and self._body:
            if self._gathers and self._is_more_to_come(data):
                return
            piece = b"".join(self._body)
            self._body.clear()
            if not self._take(piece):
                self._take = None
            elif not self._done and self._error is None:
                return
        self._buffered += len(data)
        transport = self._transport
        if self._buffered > HIGH_WATER_BYTES and self._body and not self._paused and transport is not None:
            self._paused = True
            transport.pause_reading()
        self._wake()
        if self._lingering:
            self.release()

    def _is_more_to_come(self, data: bytes) -> bool:
        """Whether the pieces so far may wait for further ones."""
        ended = self._done or self._error is not None
        return not ended and len(self._body) < GATHERED_PIECES and data.find(LAST_EVENT) < 0

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        lengths = self._answer_headers.keys() & {b"content-length", b"transfer-encoding"}
        if self.head_done and not lengths and error is None and self._error is None:
            # An answer without a length ends where the connection does.
            self._done = True
        if self._error is None:
            how = f" ({type(error).__name__})" if error is not None else ""
            self._error = ConnectionLost(
                f"the connection closed before the answer's end{how}",
                untouched=self._served > 0 and self._head_bytes == 0,
            )
        self._transport = None
        self._disarm()
        self._wake()
        self._gone(self)

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        if self._done:  # the parser passes it on as an error of its own
            raise BadHttp("bytes outside of an answer")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.head_done = self.status >= 200
        # Read here: after the answer's end the parser is at the next answer.
        self._keeps_alive = self._parser.should_keep_alive()
        self._answer_headers = {name.lower(): value for name, value in self._headers.items()}
        self.content_type = self.header(b"content-type").lower()

    def on_message_complete(self) -> None:
        """Called by the parser; an interim answer (1xx) is not the end."""
        self._done = self.head_done

    # Waiting.

    def wait(self) -> asyncio.Future[None]:
        """A future that is done at the next change. Raises the connection's error."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, error: TransportError) -> None:
        if self._error is None:
            self._error = error
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    @property
    def _unread(self) -> bool:
        """Whether the reader on this side is late."""
        return self._paused or (bool(self._body) and self._take is None)

    def _check_limits(self) -> None:
        """Fail when a limit has passed; else set the timer to the next limit."""
        self._timer = None
        if not self.busy:
            return
        now = self._loop.time()
        first_s, idle_s, total_s = self._limits
        # The idle timeout begins with the first token, and not while the reader on this side is slow.
        waits = self._first_by is not None or self._lingering or self._unread or self._done
        idle_by = (now if waits else self._last_at) + idle_s
        if now >= self._total_by and self._lingering:
            self.close()
        elif now >= self._total_by:
            self._fail(TimedOut("the answer did not end", total_s))
        elif self._first_by is not None and now >= self._first_by:
            self._fail(TimedOut("no token came", first_s))
        elif now >= idle_by:
            self._fail(TimedOut("nothing more came", idle_s))
        else:
            self._arm(min(self._first_by or idle_by, idle_by, self._total_by))

    def _arm(self, at: float) -> None:
        """Check the limits at ``at``. An earlier timer, even of an old exchange, stays and rearms itself."""
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._check_limits)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
