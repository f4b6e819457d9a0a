"""Small images of 5 by 3 pixels, and how they are named in a request."""

from __future__ import annotations

import struct
import zlib
from base64 import b64decode, b64encode

SAMPLES = {
    "png": (
        "iVBORw0KGgoAAAANSUhEUgAAAAUAAAADCAIAAADUVFKvAAAAFElEQVR4nGM8wSXHgASYGFABOh8ALIoA9h+BwCIAAAAASUVORK5CYII="
    ),
    "gif": "R0lGODdhBQADAIEAAMgKHgAAAAAAAAAAACwAAAAABQADAAAICAABCBxIsGBAADs=",
    "webp": ("UklGRjoAAABXRUJQVlA4IC4AAACQAQCdASoFAAMAAUAmJaACdLoAA5gA/vWJH+N5vNa1v/37S/8Cd/8Cd/0MAAAA"),
    "webp_lossless": "UklGRh4AAABXRUJQVlA4TBEAAAAvBIAAAAdQhSLXo/+BiOh/AAA=",
    "webp_alpha": (
        "UklGRkgAAABXRUJQVlA4WAoAAAAQAAAABAAAAgAAQUxQSAoAAAABB1CyiAhERP8DVlA4IBgAAAAwAQCdASoFAAMAAUAmJaQAA3AA/v0g"
        "UAA="
    ),
    "jpeg": (
        "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAP//////////////////////////////////////////////////////////////////////"
        "////////////////wgALCAADAAUBAREA/8QAFAABAAAAAAAAAAAAAAAAAAAAAv/aAAgBAQAAAAE//8QAFBABAAAAAAAAAAAAAAAAAAAA"
        "AP/aAAgBAQABBQJ//8QAFBABAAAAAAAAAAAAAAAAAAAAAP/aAAgBAQAGPwJ//8QAFBABAAAAAAAAAAAAAAAAAAAAAP/aAAgBAQABPyF/"
        "/9oACAEBAAAAEH//xAAUEAEAAAAAAAAAAAAAAAAAAAAA/9oACAEBAAE/EH//2Q=="
    ),
}
ANIMATED = {
    "png": (
        "iVBORw0KGgoAAAANSUhEUgAAAAUAAAADCAIAAADUVFKvAAAACGFjVEwAAAACAAAAAPONk3AAAAAaZmNUTAAAAAAAAAAFAAAAAwAAAAAA"
        "AAAAAAAAAQAAKqRK8gAAABRJREFUeJxjPMElx4AEmBhQATofACyKAPYfgcAiAAAAGmZjVEwAAAABAAAABQAAAAMAAAAAAAAAAAAAAAEA"
        "ALHXoCYAAAAYZmRBVAAAAAJ4nGNkSJFjQAJMDKgAnQ8AF/4AiHB1iqYAAAAASUVORK5CYII="
    ),
    "gif": (
        "R0lGODdhBQADAIEAAMgKHgAAAAAAAAAAACwAAAAABQADAAAICAABCBxIsGBAACH5BAEAAAEALAAAAAAFAAMAgQBkHgAAAAAAAAAAAAgI"
        "AAEIHEiwYEAAOw=="
    ),
    "webp": (
        "UklGRrwAAABXRUJQVlA4WAoAAAACAAAABAAAAgAAQU5JTQYAAAAAAAAAAABBTk1GRgAAAAAAAAAAAAQAAAIAAAAAAAJWUDggLgAAADAB"
        "AJ0BKgUAAwABQCYloAADcAD+9Ykf/43+rXyZKb//79pf/4E7//gTv+hgAABBTk1GQgAAAAAAAAAAAAQAAAIAAAAAAABWUDggKgAAADQB"
        "AJ0BKgUAAwAAACYloAADcAD+9w1v/3Q99XlS3v//mwP/s3/497WAAA=="
    ),
}


def sample(name: str) -> bytes:
    return b64decode(SAMPLES[name])


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64encode(data).decode()}"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int) -> bytes:
    """Return a PNG that declares this size but contains only a few bytes of pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
