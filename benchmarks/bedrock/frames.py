"""AWS's event stream encoding: a prelude, headers, a payload, and a checksum of each.

::

    total length | headers length | CRC-32 of these | headers | payload | CRC-32 of all before
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

STRING = 7


def frame(headers: dict[str, str], payload: bytes, *, crc_off_by: int = 0) -> bytes:
    """Encode one message. ``crc_off_by`` makes its checksum wrong."""
    encoded = b"".join(
        struct.pack(
            f"!B{len(name)}sBH{len(value.encode())}s",
            len(name),
            name.encode(),
            STRING,
            len(value.encode()),
            value.encode(),
        )
        for name, value in headers.items()
    )
    prelude = struct.pack("!II", 16 + len(encoded) + len(payload), len(encoded))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + encoded + payload
    return message + struct.pack("!I", (zlib.crc32(message) + crc_off_by) % 2**32)


def event(kind: str, body: dict[str, Any], **spoiled: int) -> bytes:
    """Encode an event as ConverseStream sends it."""
    headers = {":event-type": kind, ":content-type": "application/json", ":message-type": "event"}
    return frame(headers, json.dumps(body).encode(), **spoiled)


def exception(kind: str, message: str) -> bytes:
    """Encode an exception within a stream."""
    headers = {":exception-type": kind, ":content-type": "application/json", ":message-type": "exception"}
    return frame(headers, json.dumps({"message": message}).encode())
