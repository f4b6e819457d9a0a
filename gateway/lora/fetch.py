"""Copies adapters from a folder, an archive or ``s3://``, after a check, into this machine's store."""

import asyncio
import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from adapters.base_model import BaseModel
from adapters.catalogue import Catalogue
from adapters.errors import AdapterNotHere, AdapterRejected, Rejection
from adapters.store import AdapterStore
from adapters.unpack import is_archive
from adapters.values import Adapter
from adapters.verify import MAX_BYTES, Verified, list_files, manifest_sha256
from gateway.config.yaml_file import without_secrets
from gateway.weights.errors import FetchError, NotThere, UnknownLocation
from gateway.weights.location import S3Prefix, s3_prefix
from gateway.weights.values import Fetcher, Progress

T = TypeVar("T")

S3 = "s3://"


@dataclass(eq=False)
class AdapterSource:
    """Brings adapters into the store; a registered adapter is brought by only one task at a time.

    Args:
        fetcher: downloads from ``s3://`` into the folder ``cache``.
        s3_prefixes: where new adapters may come from; registered ones are identified by their SHA-256.
    """

    store: AdapterStore
    base: BaseModel
    fetcher: Callable[[S3Prefix], Fetcher]
    cache: Path
    s3_prefixes: Sequence[S3Prefix]
    timeout_s: float
    catalogue: Callable[[], Catalogue]

    def __post_init__(self) -> None:
        # By SHA-256; a lock lasts as long as a task holds it or waits for it.
        self._under_way = WeakValueDictionary[str, asyncio.Lock]()
        self._progress: dict[str, Progress] = {}

    @property
    def progress(self) -> Mapping[str, Progress]:
        return dict(self._progress)

    async def take(self, location: str, *, sha256: str | None = None) -> Verified:
        """Bring, check and store an adapter. Raises AdapterRejected, or AdapterNotHere when it cannot be
        brought or stored."""
        self._check_allowed(location)
        return await self._work(location, partial(self.store.take, base=self.base, sha256=sha256))

    async def check(self, location: str, *, sha256: str | None = None) -> Verified:
        """Bring and check an adapter without storing it. Raises as :meth:`take`."""
        self._check_allowed(location)
        return await self._work(location, partial(self.store.check, base=self.base, sha256=sha256))

    async def check_kept(self, adapter_id: str) -> Verified:
        """Check a registered adapter's copy on this machine again, byte by byte. Raises as :meth:`take`."""
        version = self.catalogue().version(adapter_id)
        await self._bring(version.sha256, version.location)
        path = self.store.path(version.sha256)
        check = partial(self.store.check, base=self.base, sha256=version.sha256)
        try:
            return await self._work(str(path), check)
        except AdapterRejected as error:
            source = without_secrets(version.location)
            why = f"{error.detail}; delete this folder, and it is fetched again from {source}"
            raise AdapterRejected(error.code, why) from error

    async def fingerprint(self, location: str) -> str | None:
        """The SHA-256 of a folder's unchecked content; ``None`` for an archive or ``s3://``. Raises as
        :meth:`take`."""
        path = Path(location)
        if location.startswith(S3) or is_archive(path):
            return None
        return await self._work(location, lambda folder: manifest_sha256(folder, list_files(folder)))

    async def bring(self, adapter: Adapter) -> None:
        """Bring a registered adapter to this machine, unless it is here. Raises as :meth:`take`."""
        version = self.catalogue().versions.get(adapter.adapter_id)
        if version is not None:
            await self._bring(version.sha256, version.location)

    async def _bring(self, sha256: str, location: str) -> None:
        if await asyncio.to_thread(self.store.has, sha256):
            return
        async with self._under_way.setdefault(sha256, asyncio.Lock()):
            if not await asyncio.to_thread(self.store.has, sha256):
                await self._work(location, partial(self.store.take, base=self.base, sha256=sha256))

    def _check_allowed(self, location: str) -> None:
        """Refuse ``s3://`` outside the prefixes, which the credentials may open. Raises AdapterRejected."""
        if not location.startswith(S3):
            return
        try:
            wanted = s3_prefix(location)
        except UnknownLocation as error:
            raise AdapterRejected(Rejection.NOT_FOUND, str(error)) from None
        if not any(one.holds(wanted) for one in self.s3_prefixes):
            listed = ", ".join(one.url for one in self.s3_prefixes) or "none"
            raise AdapterRejected(
                Rejection.NOT_ALLOWED,
                f"{without_secrets(location)}: not below adapters.s3_prefixes; allowed: {listed}",
            )

    async def _work(self, location: str, work: Callable[[Path], T]) -> T:
        stop = threading.Event()
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.to_thread(self._run, location, work, stop)
        except TimeoutError:
            raise AdapterNotHere(
                f"{location}: not here after adapters.fetch_timeout_seconds ({self.timeout_s:g})"
            ) from None
        finally:
            stop.set()
            self._progress.pop(location, None)

    def _run(self, location: str, work: Callable[[Path], T], stop: threading.Event) -> T:
        """Fetch the location if needed and call ``work``; blocks, so it runs in a thread."""
        try:
            path = self._fetched(location, stop) if location.startswith(S3) else Path(location)
            return work(path)
        except AdapterRejected as error:
            raise AdapterRejected(error.code, f"{without_secrets(location)}: {error.detail}") from error
        except NotThere as error:
            raise AdapterRejected(Rejection.NOT_FOUND, str(error)) from error
        except FetchError as error:
            raise AdapterNotHere(str(error)) from error
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # no machine can have it
                raise AdapterRejected(Rejection.NOT_FOUND, "the name of a file is too long") from error
            raise AdapterNotHere(f"{location}: {error.strerror or type(error).__name__}") from error

    def _fetched(self, location: str, stop: threading.Event) -> Path:
        too_large = threading.Event()

        def on_progress(progress: Progress) -> None:
            self._progress[location] = progress
            if progress.total > MAX_BYTES:
                too_large.set()
                stop.set()

        on_progress(Progress(0, 0))
        try:
            return self.fetcher(s3_prefix(location)).fetch(self.cache, on_progress=on_progress, stop=stop)
        except FetchError:
            if too_large.is_set():
                raise AdapterRejected(Rejection.TOO_LARGE, f"more than {MAX_BYTES >> 30} GiB") from None
            raise
