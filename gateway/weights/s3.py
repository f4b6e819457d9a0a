"""Fetches the files under an S3 prefix: in parallel ranges, resumable, checked, shared by processes.

Steps: list the prefix, select files, check the free disk space, transfer.
"""

import hashlib
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from gateway.config.engine import WeightsSection
from gateway.weights.errors import FetchError, NotThere, UnknownLocation, Unreachable
from gateway.weights.location import S3Prefix, is_safe, is_small, needed
from gateway.weights.records import CacheFolder
from gateway.weights.s3_client import make_client, meaning
from gateway.weights.s3_transfer import BACKOFF_S, Transfer
from gateway.weights.values import OnProgress, RemoteFile, ignore

MAX_FILES = 10_000  # a prefix with more keys is not a model


@dataclass(eq=False)
class S3Fetcher:
    """Fetches a prefix with one client; ``free_bytes`` returns the free disk space of a folder.

    Raises FetchError without boto3 or filelock.
    """

    prefix: S3Prefix
    section: WeightsSection
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    backoff_s: float = BACKOFF_S

    def __post_init__(self) -> None:
        self._client = make_client(self.section)

    def folder(self, into: Path) -> Path:
        """Return the folder of the prefix, which is the same in every process."""
        prefix = self.prefix
        name = (prefix.prefix or prefix.bucket).rpartition("/")[2]
        identity = f"{self.section.endpoint_url or ''} {prefix.url}"
        return into / "s3" / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"

    def fetch(
        self,
        into: Path,
        *,
        small: bool = False,
        on_progress: OnProgress = ignore,
        stop: threading.Event | None = None,
    ) -> Path:
        prefix, cache = self.prefix, CacheFolder(self.folder(into))
        try:
            cache.folder.mkdir(parents=True, exist_ok=True)
            found = self._list(cache)
            chosen = [file for file in found if not small or is_small(file.name)]
            if not chosen:
                raise NotThere(f"{prefix.url} holds no file that is wanted here; check the prefix")
            self._check_room(cache, chosen)
            stop = stop or threading.Event()
            transfer = Transfer(self._client, prefix, cache, self.section.connections, stop, self.backoff_s)
            transfer.run(chosen, on_progress)
            if len(chosen) == len(found):
                cache.mark_complete(found)
        except OSError as error:
            raise FetchError(
                f"{cache.folder}: {error.strerror or error}; what has arrived is kept: free some space, or "
                "set weights.cache_folder to a folder that has enough and that this user may write"
            ) from error
        return cache.folder

    def _list(self, cache: CacheFolder) -> list[RemoteFile]:
        """List the files of the source; if S3 is unreachable, those of the last complete fetch."""
        try:
            return _choose(self.prefix, self._pages())
        except Unreachable as error:
            known = cache.last_known()
            if not known:
                raise
            structlog.get_logger("weights").warning(
                "source not reached, using the files of the last fetch",
                source=self.prefix.url,
                reason=str(error),
            )
            return known

    def _pages(self) -> Iterator[Mapping[str, Any]]:
        prefix = self.prefix
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=prefix.bucket, Prefix=prefix.start
        )
        try:
            for page in pages:
                yield from page.get("Contents", ())
        except Exception as error:  # the client's errors have no common base
            raise meaning(error, prefix.url) from error

    def _check_room(self, cache: CacheFolder, files: Collection[RemoteFile]) -> None:
        lacking = sum(file.size for file in files if not cache.has(file))
        here = sum(_blocks_on_disk(cache.part(file.name)) for file in files)
        free = self.free_bytes(cache.folder)
        if lacking - here > free:
            raise FetchError(
                f"{cache.folder}: {(lacking - here) / 2**30:.2f} GiB are needed, {free / 2**30:.2f} GiB are "
                "free; free some space or set weights.cache_folder to a larger disk"
            )


def _choose(prefix: S3Prefix, objects: Iterable[Mapping[str, Any]]) -> list[RemoteFile]:
    found: dict[str, RemoteFile] = {}
    for one in objects:
        name = str(one["Key"]).removeprefix(prefix.start)
        # Consoles represent a folder by a key that ends in a slash.
        if not name or name.endswith("/"):
            continue
        if not is_safe(name):
            raise UnknownLocation(f"{prefix.url}: the key {name!r} is no file name; remove it")
        found[name] = RemoteFile(name, int(one["Size"]), str(one["ETag"]).strip('"'))
        if len(found) > MAX_FILES:
            raise UnknownLocation(f"{prefix.url} holds more than {MAX_FILES} keys; name one model's prefix")
    if not found:
        raise NotThere(f"{prefix.url} is empty or does not exist; check the bucket and the prefix")
    names = needed(found.keys())
    return [file for name, file in sorted(found.items()) if name in names]


def _blocks_on_disk(path: Path) -> int:
    """Return the bytes that a sparse part file uses on the disk."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
