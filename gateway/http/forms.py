"""Reads forms with a file without holding the file in memory."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Any, BinaryIO, Final

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from gateway.errors import BodyTooLarge, InvalidRequest
from gateway.http.body import BODY_TIMEOUT_S, BodyTooSlow, check_encoding, unsupported
from gateway.http.client_disconnect import ClientGone
from gateway.http.exchange import Exchange

FORM_BYTES: Final = 65_536
"""Most bytes of a form besides its file."""
MAX_FIELDS: Final = 16
_PIECE: Final = 1 << 18


async def read_form(request: Request, most: int, arrived: Callable[[int], None]) -> FormData:
    """Read the form, which the caller must close; a file of more than 1 MiB is on disk. ``arrived`` is called
    with the size of each piece, and may raise.

    Raises UnsupportedBody, BodyTooLarge, BodyTooSlow, InvalidRequest, ClientGone, TooManyBodies,
    TooManyOwnBodies.
    """
    exchange = Exchange.of(request.scope)
    check_encoding(exchange)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > most + FORM_BYTES):
        raise BodyTooLarge(f"the file is larger than {most} bytes", param="file")
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise unsupported(exchange, b"content-type", "multipart/form-data")
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
        raise InvalidRequest(f"the form cannot be read: {error.message}", param="file") from None
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
    return json.dumps(parts).encode()  # orjson refuses what a form's charset may decode to


def _digest(file: BinaryIO) -> str:
    file.seek(0)
    digest = hashlib.sha256()
    while piece := file.read(_PIECE):
        digest.update(piece)
    file.seek(0)
    return digest.hexdigest()
