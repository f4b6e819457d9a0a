"""The interface of fetchers, and its values."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at its source: ``name`` is relative to the prefix; ``etag`` changes with the content."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The bytes that are here, and the bytes of all files; ``total`` is 0 while unknown."""

    done: int
    total: int


OnProgress = Callable[[Progress], None]


class Fetcher(Protocol):
    """Fetches the files of one model or LoRA adapter to this machine.

    Invariants: bytes received before are not fetched again; several threads and processes may fetch the same
    source into the same folder at the same time; the files in the returned folder are complete and checked;
    ``fetch`` blocks; ``on_progress`` may be called from any thread.
    """

    def fetch(
        self,
        into: Path,
        *,
        small: bool = False,
        on_progress: OnProgress = ...,
        stop: threading.Event | None = None,
    ) -> Path:
        """Fetch the files, or with ``small`` all but the weights, into a folder below the cache ``into``.

        Ends soon after ``stop`` is set. Raises FetchError: see :mod:`gateway.weights.errors`.
        """


def ignore(progress: Progress) -> None:
    """Ignore progress."""
