"""The journal's files: each belongs to one process; when that process has ended, another may adopt the file.

A process holds a lock on each of its files, and the system releases the lock when the process ends.
So a file that can be locked is an orphan; the first process to lock it adopts it.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from accounting.journal_records import HEADER

SUFFIX: Final = ".journal"
DAMAGED: Final = ".damaged"
# A file that is not locked yet has this suffix, so that no process takes it for an orphan.
_NEW: Final = ".new"
# An unlocked new file of this age was left by a process killed while creating it, which takes 10 ms.
UNFINISHED_S: Final = 60.0


@dataclass(eq=False, slots=True)
class JournalSegment:
    """One file, open and locked. ``waiting`` counts its rows that are in memory and not yet in the database.
    ``spilled``: some rows are only in this file and must be read back. ``closed``: no more rows are added.
    """

    path: Path
    fd: int
    size: int
    waiting: int = 0
    spilled: bool = False
    closed: bool = False

    @property
    def written_at(self) -> float:
        """When it was last written to, in Unix seconds. Raises OSError."""
        return os.fstat(self.fd).st_mtime

    def write(self, data: bytes) -> None:
        """Append, and return once the disk has it. After an OSError the file must not be used."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]
        self.size += len(data)

    def remove(self) -> None:
        """Delete and release the file. Raises OSError."""
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self.release()

    def set_aside(self) -> None:
        """Rename the file so that it is not read again, for an operator to look at. Raises OSError."""
        try:
            self.path.rename(self.path.with_name(self.path.name + DAMAGED))
        finally:
            self.release()

    def release(self) -> None:
        """Close the file, which ends its lock."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def create(folder: Path, new_name: Callable[[], str]) -> JournalSegment:
    """A new file with its header, locked before it is visible. Raises OSError."""
    path = folder / f"{new_name()}{SUFFIX}"
    hidden = path.with_name(path.name + _NEW)
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_DSYNC | os.O_CLOEXEC, 0o600)
    segment = JournalSegment(path, fd, 0)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        segment.write(HEADER)
        hidden.rename(path)
        sync_folder(folder)
    except OSError:
        with contextlib.suppress(OSError):
            hidden.unlink(missing_ok=True)
        segment.release()
        raise
    return segment


def orphans(folder: Path) -> Iterator[JournalSegment]:
    """Lock and return the files of ended processes, oldest first. Raises OSError."""
    for path in folder.glob(f"*{SUFFIX}{_NEW}"):
        # A younger file is left alone: its process may not have locked it yet, and its lock would fail.
        if _is_unfinished(path) and (unfinished := _adopt(path)) is not None:
            unfinished.remove()
    for path in sorted(folder.glob(f"*{SUFFIX}"), key=lambda one: one.name):
        segment = _adopt(path)
        if segment is not None:
            yield segment


def _is_unfinished(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > UNFINISHED_S
    except FileNotFoundError:
        return False


def _adopt(path: Path) -> JournalSegment | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as unless_adopted:
        unless_adopted.callback(os.close, fd)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have adopted and deleted it between the two calls.
            here = os.fstat(fd)
            if here.st_nlink > 0 and os.path.samestat(here, path.stat()):
                unless_adopted.pop_all()
                return JournalSegment(path, fd, here.st_size, spilled=True, closed=True)
    return None


def sync_folder(folder: Path) -> None:
    """Sync the folder, so that a new file name survives a power cut. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
