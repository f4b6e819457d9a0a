"""Reads an image's type and size from its first bytes, without decoding it."""

import struct
from dataclasses import dataclass
from typing import Final

MAX_BLOCKS: Final = 100_000  # most blocks of a file that are read; a GIF of 10 MB has 41,000
PNG: Final = b"\x89PNG\r\n\x1a\n"
_NO_SIZE: Final = frozenset({0xC4, 0xC8, 0xCC})  # those JPEG markers of 0xC0 to 0xCF that begin no frame


class UnreadableImage(ValueError):
    """The bytes are not an accepted image; the message contains the reason."""


class TruncatedImage(UnreadableImage):
    """The bytes end before the header is complete; more of them may be readable."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """An image's type, and its size in pixels."""

    media_type: str
    width: int
    height: int


def read_header(data: bytes) -> ImageHeader:
    """Read the header of a PNG, JPEG, GIF or WebP with one picture. Raises UnreadableImage."""
    try:
        header = _header(data)
    except (struct.error, IndexError):
        raise TruncatedImage("ends too early") from None
    if not header.width or not header.height:
        raise UnreadableImage("has no pixels")
    return header


def _header(data: bytes) -> ImageHeader:
    if data.startswith(PNG):
        return _png(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return _gif(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    raise UnreadableImage("is no PNG, JPEG, GIF or WebP")


def _png(data: bytes) -> ImageHeader:
    """Read a PNG: the chunks before the pixels tell whether it is animated."""
    if data[12:16] != b"IHDR":
        raise UnreadableImage("is a PNG without a header")
    at = len(PNG)
    for _ in range(MAX_BLOCKS):
        (length,), kind = struct.unpack_from(">I", data, at), data[at + 4 : at + 8]
        if kind == b"IDAT":
            return ImageHeader("image/png", *struct.unpack_from(">II", data, 16))
        if kind == b"acTL" and struct.unpack_from(">I", data, at + 8)[0] > 1:
            raise UnreadableImage("is animated")
        at += 12 + length
    raise UnreadableImage("has too many blocks")


def _jpeg(data: bytes) -> ImageHeader:
    at = 2
    for _ in range(MAX_BLOCKS):
        if data[at] != 0xFF:
            raise UnreadableImage("is a broken JPEG")
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return ImageHeader("image/jpeg", width, height)
        elif marker in (0xD9, 0xDA):
            raise UnreadableImage("is a JPEG without a header")
        else:
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    raise UnreadableImage("has too many blocks")


def _gif(data: bytes) -> ImageHeader:
    """Read a GIF: two pictures make it animated; a picture may be larger than the screen in the header."""
    width, height = struct.unpack_from("<HH", data, 6)
    at = 13 + _palette(data[10])
    pictures = 0
    for _ in range(MAX_BLOCKS):
        block = data[at]
        if block == 0x3B:
            break
        if block == 0x2C:
            pictures += 1
            if pictures > 1:
                raise UnreadableImage("is animated")
            left, top, across, down = struct.unpack_from("<HHHH", data, at + 1)
            width, height = max(width, left + across), max(height, top + down)
            at = _after_blocks(data, at + 11 + _palette(data[at + 9]))
        elif block == 0x21:
            at = _after_blocks(data, at + 2)
        else:
            raise UnreadableImage("is a broken GIF")
    else:
        raise UnreadableImage("has too many blocks")
    if not pictures:
        raise UnreadableImage("has no pixels")
    return ImageHeader("image/gif", width, height)


def _palette(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_blocks(data: bytes, at: int) -> int:
    for _ in range(MAX_BLOCKS):
        if not (size := data[at]):
            return at + 1
        at += 1 + size
    raise UnreadableImage("has too many blocks")


def _webp(data: bytes) -> ImageHeader:
    kind = data[12:16]
    if kind == b"VP8X":
        if data[20] & 0x02:
            raise UnreadableImage("is animated")
        width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise UnreadableImage("is a broken WebP")
    if len(data) < 30:
        raise TruncatedImage("ends too early")
    return ImageHeader("image/webp", width, height)
