"""A partly received file: bytes at their final offsets, and for each segment the number of received bytes.

A count is written after the bytes that it counts, so it never counts missing bytes if the process is killed.
The checksum detects bytes that were lost in a crash of the machine.
"""

import hashlib
import os
import struct
from pathlib import Path
from typing import Self

from gateway.weights.values import RemoteFile

# One request fetches one segment: long enough that a request's latency is a few percent of its time, short
# enough that one file has work for all connections.
SEGMENT_BYTES = 16 << 20
_HEADER_BYTES = 32
_COUNT_BYTES = 8


class PartFile:
    """The received part of ``file``, at ``path``; may have one owner at a time. Raises OSError."""

    def __init__(self, path: Path, file: RemoteFile, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.path = path
        self._size = file.size
        self._segment_bytes = segment_bytes
        self._counts_path = path.with_name(path.name + ".counts")
        count = -(-file.size // segment_bytes)
        header = hashlib.sha256(f"{file.etag} {file.size} {segment_bytes}".encode()).digest()
        path.parent.mkdir(parents=True, exist_ok=True)
        known = self._counts_path.read_bytes() if path.is_file() and self._counts_path.is_file() else b""
        if not known.startswith(header) or len(known) != _HEADER_BYTES + _COUNT_BYTES * count:
            # There is no part, or it is of another version of the file.
            self.discard()
            known = header + bytes(_COUNT_BYTES * count)
            self._counts_path.write_bytes(known)
        self._counts = list(struct.unpack(f"<{count}Q", known[_HEADER_BYTES:]))
        self._data = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._data, self._size)
        self._counts_file = os.open(self._counts_path, os.O_WRONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._data)
        os.close(self._counts_file)

    @property
    def received_bytes(self) -> int:
        return sum(self._counts)

    @property
    def missing(self) -> list[tuple[int, int]]:
        """The missing end of each segment, as half-open byte ranges."""
        starts = range(0, self._size, self._segment_bytes)
        ranges = (
            (start + count, min(start + self._segment_bytes, self._size))
            for start, count in zip(starts, self._counts, strict=True)
        )
        return [(start, end) for start, end in ranges if start < end]

    def write(self, start: int, chunk: bytes) -> None:
        """Append a chunk to its segment; each segment has one writer thread at a time."""
        view, at = memoryview(chunk), start
        while view:
            written = os.pwrite(self._data, view, at)
            view, at = view[written:], at + written
        index = start // self._segment_bytes
        self._counts[index] = at - index * self._segment_bytes
        count = struct.pack("<Q", self._counts[index])
        os.pwrite(self._counts_file, count, _HEADER_BYTES + _COUNT_BYTES * index)

    def sync(self) -> None:
        os.fsync(self._data)

    def finish(self, target: Path) -> None:
        """Rename the complete file to ``target``, atomically."""
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.path, target)
        self._counts_path.unlink(missing_ok=True)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._counts_path.unlink(missing_ok=True)
