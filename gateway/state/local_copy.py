"""A copy of a stream in a local file, so that a gateway can start and serve while the store is unreachable.

The file is replaced atomically after an fsync, so it always contains one state of the stream. Its first line
has the stream's name, the last number and a digest of the rest; each further line is a record. Only its owner
may read it. Several processes may write one file: a newer file is not overwritten.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from accounting.events import error_kind
from accounting.journal_files import sync_folder
from gateway.state.port import Record

MAX_HEADER_BYTES = 1_024  # a first line has about 150 bytes; Sluice did not write a much longer one


class _Header(msgspec.Struct):
    stream: str
    number: int
    sha256: str


class _Line(msgspec.Struct):
    number: int
    at: float
    author: str
    data: str


class LocalCopy:
    """The file of one stream. All methods block on the disk, so they run in threads."""

    def __init__(self, folder: Path, stream: str) -> None:
        self.path = folder / f"{stream}.jsonl"
        self._stream = stream
        self._log = structlog.get_logger("state")

    def head(self) -> int:
        """Return the last record's number from the first line; 0 without a usable file."""
        try:
            with self.path.open("rb") as file:
                header = msgspec.json.decode(file.readline(MAX_HEADER_BYTES), type=_Header)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return 0
        return header.number if header.stream == self._stream else 0

    def load(self) -> Sequence[Record]:
        """Return all records; none if the file is missing or damaged. Log and rename a damaged file."""
        try:
            first, _, rest = self.path.read_bytes().partition(b"\n")
            header = msgspec.json.decode(first, type=_Header)
            if header.stream != self._stream or header.sha256 != hashlib.sha256(rest).hexdigest():
                raise ValueError("its digest differs")
            lines = msgspec.json.Decoder(_Line).decode_lines(rest)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._log.warning("local copy not read", file=str(self.path), reason=error_kind(error))
            return []
        # msgspec's two errors and UnicodeDecodeError are ValueErrors.
        except ValueError as error:
            aside = self.path.with_suffix(".damaged")
            self._log.warning(
                "local copy damaged, not used", put_aside=str(aside), reason=type(error).__name__
            )
            os.replace(self.path, aside)
            return []
        return [Record(self._stream, one.number, one.at, one.author, one.data.encode()) for one in lines]

    def extend(self, records: Sequence[Record]) -> bool:
        """Add records; the first of them may already be the file's last record.

        Returns whether the file now contains them; ``False`` if the file has another history.

        Raises OSError if the file cannot be written; the old file stays.
        """
        stored = list(self.load())
        for record in records:
            if record.number <= len(stored):
                if stored[record.number - 1] != record:
                    return False
            elif record.number == len(stored) + 1:
                stored.append(record)
            else:
                return False
        self._replace(stored)
        return True

    def _replace(self, records: Sequence[Record]) -> None:
        lines = [_Line(one.number, one.at, one.author, one.data.decode()) for one in records]
        rest = msgspec.json.Encoder().encode_lines(lines)
        header = _Header(self._stream, len(records), hashlib.sha256(rest).hexdigest())
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{self._stream}-", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(header) + b"\n" + rest)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except OSError:
            os.unlink(name)
            raise
        sync_folder(folder)
