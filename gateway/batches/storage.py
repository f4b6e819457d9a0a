"""Where the contents of files are. All methods block: they are called in threads."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Protocol

CHUNK_BYTES: Final = 64 * 1024


class FileStorage(Protocol):
    """Contents by file id; the ids are the gateway's own. Methods raise OSError."""

    def put(self, file_id: str, source: BinaryIO) -> None:
        """Store everything that ``source`` has, in place of an earlier content."""

    def chunks(self, file_id: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        """The content from ``start`` on, ``size`` bytes of it. Raises FileNotFoundError."""

    def delete(self, file_id: str) -> None:
        """Delete the content, if it is there."""


class ContentCipher(Protocol):
    """Encrypts pieces of files."""

    @property
    def overhead(self) -> int:
        """How much longer an encrypted piece is."""

    def encrypt(self, file_id: str, number: int, piece: bytes) -> bytes:
        """The piece, bound to its file and place."""

    def decrypt(self, file_id: str, number: int, piece: bytes) -> bytes:
        """The piece again. Raises OSError when it is damaged, or encrypted with an unknown key."""


class LocalFiles:
    """Files of a folder: of this machine, or one that all gateways share.

    With a ``cipher`` every piece of :data:`CHUNK_BYTES` is encrypted by itself, so that a part can be read.
    """

    def __init__(self, folder: Path, cipher: ContentCipher | None = None) -> None:
        self._folder = folder
        self._cipher = cipher

    def put(self, file_id: str, source: BinaryIO) -> None:
        """Written under another name first, so that a half-written file is never read."""
        path = self._path(file_id)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            with open(unfinished, "wb", opener=_private) as target:
                if self._cipher is None:
                    shutil.copyfileobj(source, target, CHUNK_BYTES)
                else:
                    number = 0
                    while piece := source.read(CHUNK_BYTES):
                        target.write(self._cipher.encrypt(file_id, number, piece))
                        number += 1
                target.flush()
                os.fsync(target.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def chunks(self, file_id: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        """A piece at a time."""
        overhead = 0 if self._cipher is None else self._cipher.overhead
        number, skipped = divmod(start, CHUNK_BYTES)
        left = size
        with self._path(file_id).open("rb") as source:
            source.seek(number * (CHUNK_BYTES + overhead))
            while (left is None or left > 0) and (piece := source.read(CHUNK_BYTES + overhead)):
                if self._cipher is not None:
                    piece = self._cipher.decrypt(file_id, number, piece)
                piece, skipped, number = piece[skipped:], 0, number + 1
                if left is not None:
                    piece = piece[:left]
                    left -= len(piece)
                yield piece

    def delete(self, file_id: str) -> None:
        """Whoever reads it now reads on."""
        self._path(file_id).unlink(missing_ok=True)

    def _path(self, file_id: str) -> Path:
        return self._folder / file_id[-2:] / file_id


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
