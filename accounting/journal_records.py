"""Usage rows as bytes on disk: each with its length and checksum, so that a partial row is detected.

A file is :data:`HEADER` and then frames: length and CRC-32 of the payload (both 4 bytes, little endian), and
the payload, the row as MessagePack with the names of its fields that have not their default. So rows of
older versions stay readable: a missing field has its default, an unknown one is ignored.
"""

import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from accounting.values import UsageRow

HEADER: Final = b"SLUICE\x00\x01"
# Longer than any row: the API bounds the length of texts, and a row has about 30 of them.
MAX_ROW_BYTES: Final = 1 << 20

_FRAME: Final = struct.Struct("<II")
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(UsageRow)


class NotEncodable(ValueError):
    """A row has a value that cannot be stored: a lone surrogate, or an integer over 64 bits."""


def frame(row: UsageRow) -> bytes:
    """A row's bytes. Raises NotEncodable."""
    try:
        payload = _encoder.encode(row)
    except (OverflowError, UnicodeError, TypeError) as error:
        raise NotEncodable(f"a row cannot be stored ({type(error).__name__})") from error
    if len(payload) > MAX_ROW_BYTES:
        raise NotEncodable(f"a row has {len(payload)} bytes; allowed: {MAX_ROW_BYTES} or fewer")
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


@dataclass(frozen=True, slots=True)
class Contents:
    """The complete rows of a file, and the number of bytes after the last one (from a write that was cut
    off). ``damaged``: a cut-off write does not explain the content: another kind of file, or changed bytes.
    """

    rows: tuple[UsageRow, ...]
    torn_bytes: int = 0
    damaged: bool = False


def read(data: bytes) -> Contents:
    """Every complete row of a file, up to the first incomplete one.

    A killed process leaves a part of its last write, so less than a frame follows the last complete row.
    After a power cut any bytes may follow; no answer was sent for those rows, since their sync had not
    returned.
    """
    if len(data) < len(HEADER):
        return Contents((), len(data))
    if not data.startswith(HEADER):
        return Contents((), len(data), damaged=True)
    rows: list[UsageRow] = []
    end = len(HEADER)  # of the last complete row
    while (begin := end + _FRAME.size) <= len(data):
        length, checksum = _FRAME.unpack_from(data, end)
        possible = 0 < length <= MAX_ROW_BYTES
        if possible and begin + length > len(data):
            return Contents(tuple(rows), len(data) - end, damaged=not _is_cut_off(data[begin:]))
        row = _decoded(data[begin : begin + length], checksum) if possible else None
        if row is None:
            return Contents(tuple(rows), len(data) - end, damaged=any(data[end:]))
        rows.append(row)
        end = begin + length
    return Contents(tuple(rows), len(data) - end)


def _is_cut_off(payload: bytes) -> bool:
    """Whether a row ends too early; if it does not, its length was changed, and further rows may follow."""
    try:
        msgspec.msgpack.decode(payload)
    except msgspec.DecodeError as error:
        return "truncated" in str(error) or not any(payload)
    return False


def _decoded(payload: bytes, checksum: int) -> UsageRow | None:
    with suppress(msgspec.ValidationError):
        return _decoder.decode(payload) if zlib.crc32(payload) == checksum else None
    return None
