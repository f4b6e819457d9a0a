"""``GET /v1/generate/ws``: the native stream over a WebSocket, one request a connection.

The first client frame is the request; later frames are ignored; a close cancels the request. Close codes:

* 1000 after the last event, be it ``done`` or ``error`` (a request that does not validate included);
* 1003 after an ``error`` event when the first frame is binary;
* 1008 after an ``error`` event when no frame came in time;
* 1009 after an ``error`` event when the frame is over ``max_body_bytes`` (the server may do so first).

A missing or wrong key is refused in the handshake, with the same HTTP status and body as on other paths.
"""

import asyncio
from contextlib import suppress
from typing import Final

from msgspec.structs import replace
from starlette.types import Receive, Scope, Send
from websockets.frames import CloseCode

from gateway.contracts.native_answer import NativeDialect
from gateway.errors import BodyTooLarge, InvalidRequest, PublicError, public_error
from gateway.http.authorize import caller_of
from gateway.http.disconnect_watch import until_gone
from gateway.http.exchange import ClientGone, Exchange
from gateway.http.generate import origin_of, run_journey
from gateway.http.respond import CALLER_ERRORS, error_reply, shape_of
from gateway.http.sinks import SocketSink
from gateway.ports import Services

FIRST_FRAME_S: Final = 30.0  # longest wait for the request after the handshake


class GenerateSocket:
    """A plain ASGI app for the WebSocket."""

    def __init__(self, services: Services, *, first_frame_s: float = FIRST_FRAME_S) -> None:
        self._services = services
        self._first_frame_s = first_frame_s
        self._dialect = NativeDialect()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        await receive()  # websocket.connect
        try:
            caller = caller_of(exchange)
        except CALLER_ERRORS as error:
            await deny(exchange, public_error(error), scope)
            return
        limits = await self._services.limiter.headers(caller)
        await exchange.send({"type": "websocket.accept", "headers": [*exchange.id_headers(), *limits]})
        with suppress(ClientGone):
            await self._serve(exchange, receive)

    async def _serve(self, exchange: Exchange, receive: Receive) -> None:
        sink = SocketSink(exchange)
        try:
            body = await self._first_frame(receive, sink)
            # The key may have been revoked since the handshake.
            caller = caller_of(exchange)
            await self._services.limiter.enter(caller)
            # Time counts from the request, not from the handshake.
            exchange.arrived_at = self._services.clock()
            asked = self._dialect.parse(body, origin_of(exchange))
            exchange.request_id = asked.request.request_id
            async with until_gone(exchange, receive):
                request = replace(asked.request, stream=True)
                await run_journey(self._services, request, sink, exchange=exchange)
            return
        except CALLER_ERRORS as refused:
            error = public_error(refused)
        exchange.status, exchange.error = error.status, error
        await sink.fail(error)

    async def _first_frame(self, receive: Receive, sink: SocketSink) -> bytes:
        """The request. Raises the error for a frame that is none, after setting the close code."""
        limit = self._services.limits.max_body_bytes
        try:
            async with asyncio.timeout(self._first_frame_s):
                message = await receive()
        except TimeoutError:
            sink.close_code = CloseCode.POLICY_VIOLATION
            raise InvalidRequest(f"no request came within {self._first_frame_s:g} s") from None
        if message["type"] == "websocket.disconnect":
            raise ClientGone
        text = message.get("text")
        if text is None:
            sink.close_code = CloseCode.UNSUPPORTED_DATA
            raise InvalidRequest("the frame is binary; allowed: a text frame")
        body: bytes = text.encode()
        if len(body) > limit:
            sink.close_code = CloseCode.MESSAGE_TOO_BIG
            raise BodyTooLarge(f"the frame is larger than {limit} bytes; allowed: {limit} or fewer")
        return body


async def deny(exchange: Exchange, error: PublicError, scope: Scope) -> None:
    """Answer a handshake with an HTTP error."""
    exchange.status, exchange.error = error.status, error
    if "websocket.http.response" not in scope.get("extensions", {}):
        # The server answers 403.
        await exchange.send({"type": "websocket.close", "code": CloseCode.POLICY_VIOLATION})
        return
    reply = error_reply(error, exchange.request_id, shape_of(exchange, scope["path"]))
    headers = [(b"content-type", reply.content_type), *reply.headers, *exchange.id_headers()]
    await exchange.send({"type": "websocket.http.response.start", "status": reply.status, "headers": headers})
    await exchange.send({"type": "websocket.http.response.body", "body": reply.body, "more_body": False})
