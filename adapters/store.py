"""The adapters on this machine, each in a folder named by its SHA-256: complete, checked, never changed.

Engines load from these folders only. An adapter is copied and the copy is checked, so that no file can be
swapped between the check and the load; then the copy is renamed atomically. All functions block: call them in
a thread.
"""

import contextlib
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path

from adapters.base_model import BaseModel
from adapters.errors import AdapterRejected
from adapters.peft_config import CONFIG_FILE
from adapters.safetensors import read_header
from adapters.unpack import is_archive, unpack
from adapters.verify import WEIGHTS_FILE, Verified, list_files, verify

_PARTS = ".parts"
_PIECE = 1 << 20
# Seconds after which a copy that is not complete was left by a process that was killed.
_LEFT_S = 86_400.0


class AdapterStore:
    """A folder of adapters; several processes may use it at once.

    ``folder`` is created with the first adapter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, sha256: str) -> Path:
        """The folder of the adapter with that content, once it is stored."""
        return self.folder / sha256

    def has(self, sha256: str) -> bool:
        """Whether the adapter is stored: the settings are readable, the weights as long as their header says.

        Damage inside the weights is found by :meth:`check` alone: to read them takes seconds.
        """
        folder = self.path(sha256)
        try:
            json.loads((folder / CONFIG_FILE).read_bytes())
            read_header(folder / WEIGHTS_FILE)
        except (OSError, ValueError, AdapterRejected):
            return False
        return True

    def take(self, source: Path, base: BaseModel, *, sha256: str | None = None) -> Verified:
        """Copy, check and store the adapter in a folder or an archive.

        Args:
            source: a folder, ``.tar.gz``, ``.tgz`` or ``.tar``.
            base: the base model that the adapter must fit.
            sha256: the expected SHA-256 of the content, if known.

        Raises:
            AdapterRejected: the adapter does not pass the checks; nothing is stored.
            OSError: the store cannot be written.
        """
        parts = self.folder / _PARTS
        parts.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parts) as scratch:
            folder = Path(scratch) / "adapter"
            folder.mkdir()
            _remove_left(parts, now=folder.stat().st_mtime)
            if is_archive(source):
                unpacked = Path(scratch) / "unpacked"
                unpacked.mkdir()
                unpack(source, unpacked)
                source = unpacked
            # All files are listed and checked, two are stored: engines read no others.
            list_files(source)
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                _copy(source / name, folder / name)
            verified = verify(folder, base, sha256=sha256)
            self._store(folder, verified.sha256)
        return verified

    def check(self, source: Path, base: BaseModel, *, sha256: str | None = None) -> Verified:
        """Check an adapter without storing it. Raises AdapterRejected, OSError."""
        if not is_archive(source):
            return verify(source, base, sha256=sha256)
        with tempfile.TemporaryDirectory() as scratch:
            unpack(source, Path(scratch))
            return verify(Path(scratch), base, sha256=sha256)

    def _store(self, folder: Path, sha256: str) -> None:
        target = self.path(sha256)
        for file in folder.iterdir():
            file.chmod(stat.S_IRUSR | stat.S_IRGRP)
        try:
            os.replace(folder, target)
        except OSError:
            if not self.has(sha256):  # another process may have been first with the same content
                shutil.rmtree(target, ignore_errors=True)  # it is not complete any more
                os.replace(folder, target)


def _remove_left(parts: Path, *, now: float) -> None:
    for scratch in parts.iterdir():
        with contextlib.suppress(OSError):  # another process may remove it, too
            if now - scratch.stat().st_mtime > _LEFT_S:
                shutil.rmtree(scratch)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reading, target.open("xb") as writing:
        shutil.copyfileobj(reading, writing, _PIECE)
        writing.flush()
        os.fsync(writing.fileno())
