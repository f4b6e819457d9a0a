"""Unpacks an adapter's archive into an empty folder: only plain files, inside the folder, not too many."""

import errno
import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

from adapters.errors import AdapterRejected, Rejection
from adapters.verify import MAX_BYTES, MAX_FILES

SUFFIXES = (".tar.gz", ".tgz", ".tar")
_PIECE = 1 << 20
# Most bytes of an archive's headers: 2 * MAX_FILES entries take a few hundred bytes each. A tar's extended
# header may claim any length, and reading it would take as much memory.
_MAX_HEADER_BYTES = 1 << 20
# Most characters of an entry's whole name, as in file systems; the name also creates folders.
_MAX_NAME = 255
_GZIP = b"\x1f\x8b"
_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def unpack(archive: Path, into: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Unpack ``archive`` into the empty folder ``into``; a single folder around everything is dropped.
    Blocks.

    Sizes in the archive are not trusted: bytes are counted as they are written. Raises AdapterRejected:
    ``not_found``, ``outside_folder`` (absolute, ``..``, links, devices), ``too_large``, ``bad_archive``;
    OSError: the disk is at fault.
    """
    if not archive.is_file():
        raise AdapterRejected(Rejection.NOT_FOUND, "no such file")
    try:
        with _opened(archive, max_bytes) as (tar, members):
            files = [member for member in members if not member.isdir()]
            names = [_safe_name(member) for member in files]
            tops = {name.parts[0] for name in names if len(name.parts) > 1}
            around = tops.pop() if len(tops) == 1 and all(len(name.parts) > 1 for name in names) else None
            written = 0
            for member, name in zip(files, names, strict=True):
                target = into / (name.relative_to(around) if around else name)
                target.parent.mkdir(parents=True, exist_ok=True)
                source = cast("IO[bytes]", tar.extractfile(member))  # never None: all are plain files
                with source, target.open("xb") as out:
                    while piece := source.read(_PIECE):
                        written += len(piece)
                        if written > max_bytes:
                            raise AdapterRejected(
                                Rejection.TOO_LARGE,
                                f"unpacks to more than {max_bytes:,} bytes",
                            )
                        out.write(piece)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise
        raise AdapterRejected(
            Rejection.BAD_ARCHIVE, f"cannot be unpacked ({type(error).__name__})"
        ) from error


class _BoundedHeaders:
    """An archive's file; until ``listed`` is set, only ``_MAX_HEADER_BYTES`` may be read."""

    def __init__(self, file: IO[bytes], max_position: int) -> None:
        self.tell, self.close, self.seekable = file.tell, file.close, file.seekable
        self.listed = False
        self._file = file
        self._left = _MAX_HEADER_BYTES
        self._max_position = max_position

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes. Raises AdapterRejected (``too_large``)."""
        if self.listed:
            return self._file.read(size)
        data = self._file.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise AdapterRejected(
                Rejection.TOO_LARGE, f"the archive's headers are more than {_MAX_HEADER_BYTES:,} bytes"
            )
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        """Move to a position. Raises AdapterRejected (``too_large``): skipped bytes are unpacked, too."""
        if position > self._max_position:
            raise AdapterRejected(
                Rejection.TOO_LARGE, f"the archive unpacks to more than {self._max_position:,} bytes"
            )
        return self._file.seek(position, whence)


@contextmanager
def _opened(archive: Path, max_bytes: int) -> Iterator[tuple[tarfile.TarFile, list[tarfile.TarInfo]]]:
    with archive.open("rb") as file:
        compressed = file.read(2) == _GZIP
    with gzip.open(archive) if compressed else archive.open("rb") as file:
        # The bound on the content does not include headers and padding.
        bounded = _BoundedHeaders(cast("IO[bytes]", file), max_bytes + 2 * _MAX_HEADER_BYTES)
        with tarfile.open(fileobj=cast("IO[bytes]", bounded), mode="r:") as tar:
            found: list[tarfile.TarInfo] = []
            for info in tar:
                found.append(info)
                if len(found) > 2 * MAX_FILES:
                    raise AdapterRejected(Rejection.TOO_LARGE, f"more than {2 * MAX_FILES} entries")
            bounded.listed = True
            yield tar, found


def _safe_name(member: tarfile.TarInfo) -> PurePosixPath:
    name = PurePosixPath(member.name)
    short = len(member.name) <= _MAX_NAME
    inside = short and not name.is_absolute() and ".." not in name.parts and "\\" not in member.name
    if not member.isreg() or not inside or not name.parts or "\x00" in member.name:
        raise AdapterRejected(
            Rejection.OUTSIDE_FOLDER,
            f"archive entry {member.name[:100]!r}: only plain files within it are taken, "
            f"names up to {_MAX_NAME} characters",
        )
    return name
