"""Brings adapters from a folder, an archive or ``s3://``, checked, into this machine's store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from adapters.base_model import BaseModel
from adapters.catalogue import Catalogue
from adapters.errors import AdapterNotHere, AdapterRejected, Rejection
from adapters.store import AdapterStore
from adapters.unpack import is_archive
from adapters.values import Adapter
from adapters.verify import MAX_BYTES, Verified, list_files, manifest_sha256
from gateway.weights.errors import FetchError, NotThere
from gateway.weights.values import Fetcher, OnProgress, Progress

T = TypeVar("T")

S3 = "s3://"


class AdapterSource:
    """Takes adapters into the store; each content once at a time.

    Args:
        store: where they are kept.
        base: what they must fit.
        fetcher: makes what fetches from ``s3://``; raises FetchError when that cannot be.
        cache: the folder of what was fetched.
        timeout_s: longest that fetching one may take.
        catalogue: the registry as it stands.
    """

    def __init__(
        self,
        store: AdapterStore,
        base: BaseModel,
        *,
        fetcher: Callable[[], Fetcher],
        cache: Path,
        timeout_s: float,
        catalogue: Callable[[], Catalogue],
    ) -> None:
        self._store = store
        self._base = base
        self._fetcher = fetcher
        self._cache = cache
        self._timeout_s = timeout_s
        self._catalogue = catalogue
        self._under_way: dict[str, asyncio.Lock] = {}
        self._progress: dict[str, Progress] = {}

    @property
    def progress(self) -> Mapping[str, Progress]:
        """What is fetched now, by its address, and how far it is."""
        return dict(self._progress)

    async def take(self, location: str, *, sha256: str | None = None) -> Verified:
        """Bring, check and keep an adapter.

        Raises:
            AdapterRejected: it did not pass.
            AdapterNotHere: it could not be brought or kept.
        """
        return await self._work(location, lambda path: self._store.take(path, self._base, sha256=sha256))

    async def check(self, location: str, *, sha256: str | None = None) -> Verified:
        """Bring and check an adapter, and keep nothing of it. Raises as :meth:`take`."""
        return await self._work(location, lambda path: self._store.check(path, self._base, sha256=sha256))

    async def check_kept(self, adapter_id: str) -> Verified:
        """Check a registered adapter's copy on this machine anew, byte by byte.

        Raises:
            AdapterRejected: it is not what was registered, or does not fit what is served now.
            AdapterNotHere: it could not be brought.
        """
        version = self._catalogue().version(adapter_id)
        await self._bring(version.sha256, version.location)
        path = self._store.path(version.sha256)
        return await self._work(
            str(path), lambda folder: self._store.check(folder, self._base, sha256=version.sha256)
        )

    async def fingerprint(self, location: str) -> str | None:
        """The SHA-256 of a folder's content, unchecked; ``None`` for what must be brought first.

        Raises AdapterRejected when it is no adapter's folder.
        """
        path = Path(location)
        if location.startswith(S3) or is_archive(path):
            return None
        return await self._work(location, lambda folder: manifest_sha256(folder, list_files(folder)))

    async def bring(self, adapter: Adapter) -> None:
        """Make sure that a registered adapter is on this machine; another process may have registered it.

        Raises:
            AdapterRejected, AdapterNotHere: it is not, and cannot be brought.
        """
        version = self._catalogue().versions.get(adapter.adapter_id)
        if version is not None:
            await self._bring(version.sha256, version.location)

    async def _bring(self, sha256: str, location: str) -> None:
        if await asyncio.to_thread(self._store.has, sha256):
            return
        lock = self._under_way.setdefault(sha256, asyncio.Lock())
        try:
            async with lock:
                if not await asyncio.to_thread(self._store.has, sha256):
                    await self.take(location, sha256=sha256)
        finally:
            if not lock.locked():
                self._under_way.pop(sha256, None)

    async def _work(self, location: str, work: Callable[[Path], T]) -> T:
        stop = threading.Event()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.to_thread(self._run, location, work, stop)
        except TimeoutError:
            raise AdapterNotHere(
                f"{location}: not here after adapters.fetch_timeout_seconds ({self._timeout_s:g})"
            ) from None
        finally:
            stop.set()
            self._progress.pop(location, None)

    def _run(self, location: str, work: Callable[[Path], T], stop: threading.Event) -> T:
        """In a thread: all that blocks."""
        try:
            path = self._fetched(location, stop) if location.startswith(S3) else Path(location)
            return work(path)
        except NotThere as error:
            raise AdapterRejected(Rejection.NOT_FOUND, str(error)) from error
        except FetchError as error:
            raise AdapterNotHere(str(error)) from error
        except OSError as error:
            raise AdapterNotHere(f"{location}: {error.strerror or type(error).__name__}") from error

    def _fetched(self, location: str, stop: threading.Event) -> Path:
        too_large = threading.Event()

        def told(progress: Progress) -> None:
            self._progress[location] = progress
            if progress.total > MAX_BYTES:
                too_large.set()
                stop.set()

        watched: OnProgress = told
        watched(Progress(0, 0))
        try:
            return self._fetcher().fetch(location, self._cache, on_progress=watched, stop=stop)
        except FetchError:
            if too_large.is_set():
                raise AdapterRejected(
                    Rejection.TOO_LARGE, f"{location}: more than {MAX_BYTES >> 30} GiB"
                ) from None
            raise
