"""Reads a request's body within bounds of size and time."""

import asyncio
from io import BytesIO
from typing import Final

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.contracts.refusals import path_of
from gateway.errors import BodyTooLarge, InvalidRequest
from gateway.http.client_disconnect import ClientGone
from gateway.http.exchange import Exchange
from gateway.requests.body_memory import UNCOUNTED_BYTES

BODY_TIMEOUT_S: Final = 30.0
"""Longest time a body may take to arrive: 4 MiB at 1 Mbit/s."""
DISCARD_FACTOR: Final = 4
"""A body that is too large is read and discarded up to this many times the limit, so that a client that sends
first and reads afterwards gets its 413 rather than a reset connection."""

_ENCODING: Final = b"content-encoding"


class BodyTooSlow(InvalidRequest, status=408, code="invalid_request"):
    """The body did not arrive in time."""


class UnsupportedBody(InvalidRequest, status=415, code="invalid_request"):
    """The body has an encoding or a type that the path does not accept."""


def unsupported(exchange: Exchange, header: bytes, allowed: str) -> UnsupportedBody:
    """The refusal of a body because of its encoding or type header."""
    value = path_of([exchange.headers.get(header, b"").decode("latin-1")])
    name = header.decode()
    return UnsupportedBody(f"the header {name} is '{value}'; allowed: {allowed}", param=name)


def check_encoding(exchange: Exchange) -> None:
    """Refuse a compressed body. Raises UnsupportedBody."""
    encoding = exchange.headers.get(_ENCODING)
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise unsupported(exchange, _ENCODING, "identity, or no such header")


async def read_body(
    exchange: Exchange, receive: Receive, limit: int, *, timeout_s: float = BODY_TIMEOUT_S
) -> bytes:
    """Read the whole body.

    Raises UnsupportedBody, BodyTooLarge, BodyTooSlow, TooManyBodies, TooManyOwnBodies, ClientGone.
    """
    check_encoding(exchange)
    cycle = getattr(receive, "__self__", None)
    if isinstance(cycle, RequestResponseCycle) and not (cycle.more_body or cycle.disconnected):
        # uvicorn has the whole body already: there is no wait, so no timer is needed.
        body, cycle.body = bytes(cycle.body), bytearray()
        if len(body) > limit:
            raise _too_large(limit)
        if len(body) > UNCOUNTED_BYTES:
            exchange.hold_body(len(body))
        return body
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(exchange, receive, limit)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from None


async def _read(exchange: Exchange, receive: Receive, limit: int) -> bytes:
    declared = exchange.headers.get(b"content-length", b"")
    too_large = declared.isdigit() and (len(declared) > 18 or int(declared) > limit)
    if too_large and b"expect" in exchange.headers:
        raise _too_large(limit)  # the client waits for permission to send
    body = BytesIO()  # getvalue() copies nothing; joining a list of pieces would hold the body twice
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            too_large = True
        if too_large:
            body = BytesIO()
            if size > DISCARD_FACTOR * limit:
                raise _too_large(limit)
        elif piece:
            exchange.hold_body(size)
            body.write(piece)
        if not message.get("more_body", False):
            if too_large:
                raise _too_large(limit)
            return body.getvalue()


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes; allowed: {limit} or fewer")
