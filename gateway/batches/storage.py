"""Storage of the contents of files. All methods block: they are called in threads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

if TYPE_CHECKING:
    from gateway.keys.sealing import AesCipher

CHUNK_BYTES: Final = 64 * 1024
FILE_ID: Final = re.compile(r"file-[0-9a-f]+(-[a-z]+)?")
"""The form of file ids. A file with another name is not the gateway's, and is never deleted."""


class FileStorage(Protocol):
    """Contents by file id; the ids are the gateway's own. Methods raise OSError."""

    def put(self, file_id: str, source: BinaryIO) -> None:
        """Store the whole of ``source``, in place of an earlier content."""

    def chunks(self, file_id: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        """The content from ``start`` on, ``size`` bytes of it. Raises FileNotFoundError."""

    def check_key(self, file_id: str, size: int) -> None:
        """Raise OSError if the content, of ``size`` bytes, is encrypted and this storage has no key."""

    def delete(self, file_id: str) -> None:
        """Delete the content, if it is there."""

    def older_than(self, unix_time: float) -> Iterator[str]:
        """The ids (:data:`FILE_ID`) of contents last changed before ``unix_time``, complete or not."""


class Pieces:
    """The form in which contents are stored.

    With a ``cipher`` every piece of :data:`CHUNK_BYTES` is encrypted by itself, so that a part can be read.
    """

    def __init__(self, cipher: AesCipher | None = None) -> None:
        self._cipher = cipher
        self._stored_bytes = CHUNK_BYTES + (0 if cipher is None else cipher.overhead)

    def stored(self, file_id: str, source: BinaryIO) -> Iterator[bytes]:
        number = 0
        while piece := source.read(CHUNK_BYTES):
            yield piece if self._cipher is None else self._cipher.encrypt(piece, _place(file_id, number))
            number += 1

    def check_key(self, file_id: str, size: int, stored_bytes: Callable[[], int]) -> None:
        """Raise OSError if a content of ``size`` bytes is stored in more, and there is no cipher."""
        if self._cipher is None and stored_bytes() > size:
            raise OSError(f"{file_id} cannot be decrypted: its key is not given")

    def part(
        self, file_id: str, start: int, size: int | None, read_from: Callable[[int, int | None], BinaryIO]
    ) -> Iterator[bytes]:
        """A part of a content. ``read_from`` opens the stored bytes from one position up to another."""
        number, skipped = divmod(start, CHUNK_BYTES)
        left = size
        end = None if size is None else -(-(start + size) // CHUNK_BYTES) * self._stored_bytes
        if size == 0:
            return
        with read_from(number * self._stored_bytes, end) as source:
            while (left is None or left > 0) and (piece := source.read(self._stored_bytes)):
                if self._cipher is not None:
                    piece = _decrypted(self._cipher, piece, file_id, number)
                piece, skipped, number = piece[skipped:], 0, number + 1
                if left is not None:
                    piece = piece[:left]
                    left -= len(piece)
                yield piece


def _place(file_id: str, number: int) -> bytes:
    """The file and position to which an encrypted piece is bound."""
    return b"%s:%d" % (file_id.encode(), number)


def _decrypted(cipher: AesCipher, piece: bytes, file_id: str, number: int) -> bytes:
    found = cipher.decrypt(piece, _place(file_id, number))
    if found is None:
        raise OSError(f"{file_id} cannot be decrypted: it is damaged, or its key is not given")
    return found


class LocalFiles:
    """Contents as files in a folder of this machine, or in one that all gateways share."""

    def __init__(self, folder: Path, cipher: AesCipher | None = None) -> None:
        self._folder = folder
        self._pieces = Pieces(cipher)

    def put(self, file_id: str, source: BinaryIO) -> None:
        """Store under another name first, so that a half-written file is never read."""
        path = self._path(file_id)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            with open(unfinished, "wb", opener=_private) as target:
                target.writelines(self._pieces.stored(file_id, source))
                target.flush()
                os.fsync(target.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def chunks(self, file_id: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        def read_from(at: int, end: int | None) -> BinaryIO:
            source = self._path(file_id).open("rb")
            source.seek(at)
            return source

        return self._pieces.part(file_id, start, size, read_from)

    def check_key(self, file_id: str, size: int) -> None:
        self._pieces.check_key(file_id, size, lambda: self._path(file_id).stat().st_size)

    def delete(self, file_id: str) -> None:
        """Delete the content, also what a killed process left of it. Open readers can read on."""
        path = self._path(file_id)
        path.unlink(missing_ok=True)
        for unfinished in path.parent.glob(f"{path.name}.*.new"):
            unfinished.unlink(missing_ok=True)

    def older_than(self, unix_time: float) -> Iterator[str]:
        for path in self._folder.glob("*/file-*"):
            file_id = path.name.partition(".")[0]
            with suppress(FileNotFoundError):  # renamed or deleted meanwhile
                if FILE_ID.fullmatch(file_id) and path.stat().st_mtime < unix_time:
                    yield file_id

    def _path(self, file_id: str) -> Path:
        return self._folder / file_id[-2:] / file_id


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
