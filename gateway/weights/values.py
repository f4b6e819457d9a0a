"""What fetchers take and give: the port, a remote file, progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at its source: ``name`` below the prefix, with ``/``; ``etag`` changes when its content does."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes that are here of those that are wanted; ``total`` 0 while it is not known."""

    done: int
    total: int


OnProgress = Callable[[Progress], None]


class Fetcher(Protocol):
    """Brings the files under an address onto this machine; models and LoRA adapters alike.

    Invariants: what has arrived before is not fetched again; several threads and processes may fetch the
    same address into the same folder at once; the files in the returned folder are whole and checked, under
    their final names; blocking, so called from a thread; ``on_progress`` may be called from any thread.
    """

    def fetch(
        self,
        url: str,
        into: Path,
        *,
        wanted: Callable[[str], bool] = ...,
        on_progress: OnProgress = ...,
        stop: threading.Event | None = None,
    ) -> Path:
        """Fetch the files whose name is ``wanted``.

        Args:
            url: the address.
            into: the cache; files lie in a folder of their own below it.
            wanted: chooses files by their name.
            on_progress: told after each chunk.
            stop: once set, the fetch ends soon.

        Raises:
            FetchError: see :mod:`gateway.weights.errors`.
        """


def everything(name: str) -> bool:
    """Every file is wanted."""
    return True


def ignore(progress: Progress) -> None:
    """Nobody watches."""


class ByteCounter:
    """Adds up bytes from several threads and tells of them."""

    def __init__(self, total: int, on_progress: OnProgress) -> None:
        self._total = total
        self._done = 0
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        """So many more bytes are here; negative when some were thrown away."""
        with self._lock:
            self._done += size
            self._on_progress(Progress(self._done, self._total))
