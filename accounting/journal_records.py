"""Usage rows as bytes on disk: each with its length and its checksum, so that half a row is seen as such.

A file is :data:`HEADER` and then frames: length and CRC-32 of the payload (both 4 bytes, little endian), and
the payload, the row as MessagePack with its fields' names. So rows of older versions stay readable: a
field that they lack has its default, one that is not known any more is left out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from accounting.values import UsageRow

HEADER: Final = b"SLUICE\x00\x01"
# No row is longer: texts are bounded at the edge, and a row has about 30 of them.
MAX_ROW_BYTES: Final = 1 << 20

_FRAME: Final = struct.Struct("<II")
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(UsageRow)


class NotEncodable(ValueError):
    """A row holds what no file and no database takes: half a character, an integer beyond 64 bits."""


def frame(row: UsageRow) -> bytes:
    """A row's bytes. Raises NotEncodable."""
    try:
        payload = _encoder.encode(row)
    except (OverflowError, UnicodeError, TypeError) as error:
        raise NotEncodable(f"a row cannot be kept ({type(error).__name__})") from error
    if len(payload) > MAX_ROW_BYTES:
        raise NotEncodable(f"a row has {len(payload)} bytes; allowed: {MAX_ROW_BYTES} or fewer")
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds.

    Args:
        rows: the whole ones, in their order.
        torn_bytes: behind the last whole row, where a write was cut off; 0 for a file that was finished.
        damaged: whether more than a cut-off write is wrong: a file of another kind, or bytes that changed.
    """

    rows: tuple[UsageRow, ...]
    torn_bytes: int = 0
    damaged: bool = False


def read(data: bytes) -> Contents:
    """Every whole row of a file, up to the first that is not.

    A process that is killed leaves a beginning of what it wrote, so what follows the last whole row is less
    than a frame. After a power cut it may be zeros or anything: no answer waited for those rows either, since
    the sync had not returned.
    """
    if len(data) < len(HEADER):
        return Contents((), len(data))
    if not data.startswith(HEADER):
        return Contents((), len(data), damaged=True)
    rows: list[UsageRow] = []
    end, wrong = len(HEADER), False
    for stop, row in _frames(data):
        if row is None:
            wrong = True
            break
        rows.append(row)
        end = stop
    return Contents(tuple(rows), len(data) - end, damaged=wrong and any(data[end:]))


def _frames(data: bytes) -> Iterator[tuple[int, UsageRow | None]]:
    """Each frame's end and row; ``None`` for one that is wrong, after which there is nothing to go by."""
    at = len(HEADER)
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        stop = at + _FRAME.size + length
        if 0 < length <= MAX_ROW_BYTES and stop > len(data):
            return  # cut off
        payload = data[at + _FRAME.size : stop]
        if not 0 < length <= MAX_ROW_BYTES or zlib.crc32(payload) != checksum:
            yield stop, None
            return
        try:
            yield stop, _decoder.decode(payload)
        except msgspec.ValidationError:
            yield stop, None
            return
        at = stop
