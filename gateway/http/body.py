"""Reads a request's body, or a form with a file, within bounds of size and time. Files are not in memory."""

import asyncio
import hashlib
from collections.abc import Callable
from io import BytesIO
from typing import Any, Final

import orjson
import structlog
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.contracts.refusals import not_allowed, path_of
from gateway.errors import BackendUnavailable, BodyTooLarge, InvalidRequest
from gateway.http.exchange import ClientGone, Exchange
from gateway.requests.body_memory import UNCOUNTED_BYTES

BODY_TIMEOUT_S: Final = 30.0  # longest time a body may take to arrive: 4 MiB at 1 Mbit/s
DISCARD_FACTOR: Final = 4
"""A body that is too large is read and discarded up to this many times the limit, so that a client that sends
first and reads afterwards gets its 413 rather than a reset connection."""
FORM_BYTES: Final = 65_536  # most bytes of a form besides its file
MAX_FIELDS: Final = 16
RETRY_MS: Final = 1_000

_ENCODING: Final = b"content-encoding"
# Charsets of forms. Others may decode to what is no text, or fail in ways that the parser does not know.
_CHARSETS: Final = frozenset({b"utf-8", b"utf8", b"us-ascii", b"iso-8859-1"})


class BodyTooSlow(InvalidRequest, status=408, code="invalid_request"):
    """The body did not arrive in time."""


class UnsupportedBody(InvalidRequest, status=415, code="invalid_request"):
    """The body has an encoding or a type that the path does not accept."""


def unsupported(exchange: Exchange, header: bytes, allowed: str) -> UnsupportedBody:
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

    Raises UnsupportedBody, BodyTooLarge, BodyTooSlow, TooManyBodies, RateLimited, ClientGone.
    """
    if _ENCODING in exchange.headers:
        check_encoding(exchange)
    cycle = getattr(receive, "__self__", None)
    if isinstance(cycle, RequestResponseCycle) and not (cycle.more_body or cycle.disconnected):
        # uvicorn has the whole body already: there is no wait, so no timer is needed.
        body, cycle.body = bytes(cycle.body), bytearray()
        if len(body) > limit:
            raise body_too_large(limit)
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
        raise body_too_large(limit)  # the client waits for permission to send
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
                raise body_too_large(limit)
        elif piece:
            exchange.hold_body(size)
            body.write(piece)
        if not message.get("more_body", False):
            if too_large:
                raise body_too_large(limit)
            return body.getvalue()


def body_too_large(limit: int) -> BodyTooLarge:
    """The refusal of a body of more than ``limit`` bytes."""
    return BodyTooLarge(f"the body is larger than {limit} bytes; allowed: {limit} or fewer")


async def read_form(request: Request, most: int, arrived: Callable[[int], None]) -> FormData:
    """Read the form, which the caller must close; a file of more than 1 MiB is on disk. ``arrived`` is called
    with the size of each piece, and may raise.

    Raises UnsupportedBody, BodyTooLarge, BodyTooSlow, InvalidRequest, ClientGone, TooManyBodies,
    RateLimited, BackendUnavailable (the disk).
    """
    exchange = Exchange.of(request.scope)
    check_encoding(exchange)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > most + FORM_BYTES):
        raise BodyTooLarge(f"the file is larger than {most} bytes", param="file")
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or options.get(b"charset", b"utf-8").lower() not in _CHARSETS:
        raise unsupported(exchange, b"content-type", "multipart/form-data in UTF-8")
    whole = 0

    async def receive() -> Message:
        nonlocal whole
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                message = await request.receive()
        except TimeoutError:
            raise BodyTooSlow(f"nothing of the body arrived for {BODY_TIMEOUT_S:g} s") from None
        size = len(message.get("body", b""))
        whole += size
        if whole > most + FORM_BYTES:
            raise BodyTooLarge(f"the body is larger than {most + FORM_BYTES} bytes", param="file")
        arrived(size)
        exchange.hold_body(min(whole, MultiPartParser.spool_max_size))
        return message

    bounded = Request(request.scope, receive)
    parser = MultiPartParser(
        bounded.headers, bounded.stream(), max_files=1, max_fields=MAX_FIELDS, max_part_size=FORM_BYTES
    )
    try:
        return await parser.parse()
    except MultiPartException as error:
        name = parser._current_part.field_name  # of the part that is one too many or too long
        param = path_of([name]) if name else None
        if parser._current_files > 1:
            raise not_allowed(param or "file", "is a second file", "one file") from None
        raise InvalidRequest(f"the form cannot be read: {error.message}", param=param) from None
    except OSError as error:
        structlog.get_logger("gateway.http").error("upload not written to TMPDIR", reason=str(error))
        raise BackendUnavailable(
            "the file cannot be stored now: its storage fails", retry_after_ms=RETRY_MS
        ) from error
    except ClientDisconnect:
        raise ClientGone from None


async def form_content(form: FormData) -> bytes:
    """Bytes that are the same for equal forms: names, texts and the files' digests, in order. The boundary,
    which clients choose per request, is left out. Files are read in a thread and reset to their start.
    """
    parts: list[list[Any]] = []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            digest = await asyncio.to_thread(_digest, value.file)
            parts.append([name, value.filename, value.content_type, digest])
        else:
            parts.append([name, value])
    return orjson.dumps(parts)


def _digest(file: Any) -> str:
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    return digest
