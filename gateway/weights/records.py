"""The state of a cache folder, in its subfolder ``.sluice``: locks, parts, records of checked files."""

import json
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gateway.weights.values import RemoteFile

STATE = ".sluice"


class CacheFolder:
    """The files of one address, and their records. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state = folder / STATE

    def part(self, name: str) -> Path:
        return self._state / "files" / f"{name}.part"

    def lock(self, name: str) -> Path:
        """Return the path of a file's lock; the lock file stays, the lock ends with its process."""
        path = self._state / "files" / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def has(self, file: RemoteFile) -> bool:
        """Whether this version of the file is here and was checked; does not read its content."""
        record = read_json(self._record(file.name))
        path = self.folder / file.name
        return (
            record.get("etag") == file.etag
            and record.get("size") == file.size
            and path.is_file()
            and path.stat().st_size == file.size
        )

    def checked(self, file: RemoteFile, by: str) -> None:
        """Record that the file is here and was checked with the checksum kind ``by``."""
        write_json(self._record(file.name), {"etag": file.etag, "size": file.size, "checked_by": by})

    def _record(self, name: str) -> Path:
        return self._state / "files" / f"{name}.json"

    def mark_complete(self, files: Collection[RemoteFile]) -> None:
        write_json(self._state / "all.json", {"files": [[f.name, f.size, f.etag] for f in files]})

    def last_known(self) -> list[RemoteFile]:
        """Return the files of the last complete fetch; empty if there was none, or a file is missing."""
        listed = read_json(self._state / "all.json").get("files", [])
        files = [RemoteFile(str(name), int(size), str(etag)) for name, size, etag in listed]
        return files if all(self.has(file) for file in files) else []


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if there is no usable one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(content))


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically, by one whose name begins with a dot; only its owner may read it.

    Raises OSError.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
