"""A file that is arriving: its bytes at their places, and a journal of which have come.

A line of the journal follows the bytes it tells of, so that after a kill at any moment no byte is trusted
that was not written; the checksum covers what a crash of the machine may do beyond that.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from gateway.weights.intervals import Interval, length, missing
from gateway.weights.values import RemoteFile


class PartFile:
    """The part that is here of ``file``, at ``path`` with its journal beside it; one owner at a time.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """

    def __init__(self, path: Path, file: RemoteFile) -> None:
        self.path = path
        self._journal_path = path.with_name(path.name + ".journal")
        self._header = f"{file.etag} {file.size}\n"
        self._size = file.size
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        here = self._read_journal()
        if here is None:
            self.discard()
            here = []
        self.missing: list[Interval] = missing(self._size, here)
        self._data = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._data, self._size)
        # Written anew, so that it neither grows with every resumption nor keeps a torn line.
        lines = [f"{start} {end}\n" for start, end in missing(self._size, self.missing)]
        fresh = self._journal_path.with_name(self._journal_path.name + ".new")
        fresh.write_text(self._header + "".join(lines), encoding="utf-8")
        os.replace(fresh, self._journal_path)
        self._journal = os.open(self._journal_path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        """The file is open already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; the part stays."""
        os.close(self._data)
        os.close(self._journal)

    @property
    def here(self) -> int:
        """Bytes that were here when it was opened."""
        return self._size - length(self.missing)

    def write(self, start: int, chunk: bytes) -> None:
        """Put a chunk at its place; safe from several threads."""
        view = memoryview(chunk)
        at = start
        while view:
            written = os.pwrite(self._data, view, at)
            view = view[written:]
            at += written
        with self._lock:
            os.write(self._journal, f"{start} {at}\n".encode())

    def sync(self) -> None:
        """Have the bytes on the disk."""
        os.fsync(self._data)

    def finish(self, target: Path) -> None:
        """Give the whole file its name, in one step."""
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.path, target)
        self._journal_path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Throw away what is here."""
        self.path.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)

    def _read_journal(self) -> list[Interval] | None:
        """What is here; None when it is of another version of the file."""
        if not self.path.is_file() or not self._journal_path.is_file():
            return None
        lines = self._journal_path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        if not lines or lines[0] != self._header:
            return None
        here: list[Interval] = []
        for line in lines[1:]:
            words = line.split()
            # A line without its end was being written when the process died.
            if line.endswith("\n") and len(words) == 2 and all(word.isdecimal() for word in words):
                here.append((int(words[0]), int(words[1])))
        return here
