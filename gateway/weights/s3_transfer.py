"""Fetches chosen files of an S3 prefix into a cache folder, in threads.

Steps of a file: lock, stop if it is here, find its expected content, fetch the missing ranges, check, rename,
record. Two processes share the work, because each file has its own lock.

boto3's transfer manager is not used: see docs/decisions/013-own-ranges-from-s3.md.
"""

import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gateway.weights.checksum import Expected, fault, from_head, is_manifest, read_manifest
from gateway.weights.errors import FetchError, FetchStopped, Unreachable
from gateway.weights.location import S3Prefix, is_small
from gateway.weights.part_file import PartFile
from gateway.weights.records import CacheFolder
from gateway.weights.s3_client import meaning, transient
from gateway.weights.values import OnProgress, Progress, RemoteFile

CHUNK_BYTES = 1 << 20
FILES_AT_ONCE = 4
# The most consecutive failures of a range without a byte, and the first wait in seconds, which doubles.
ATTEMPTS = 5
BACKOFF_S = 0.5
LOCK_POLL_S = 0.1
MANIFEST_BYTES = 1 << 20


@dataclass(eq=False)
class Transfer:
    """One fetch of files below ``prefix`` into ``cache``; it ends soon after ``stop`` is set.

    The threads share ``client``; ``backoff_s`` is the first wait before a broken range is requested again.
    """

    client: Any
    prefix: S3Prefix
    cache: CacheFolder
    connections: int
    stop: threading.Event
    backoff_s: float

    def __post_init__(self) -> None:
        self._failed = threading.Event()
        self._manifest: dict[str, str] = {}

    def run(self, files: Collection[RemoteFile], on_progress: OnProgress) -> None:
        """Fetch ``files``: manifests first, then the small ones."""
        total, done, counting = sum(file.size for file in files), 0, threading.Lock()

        def count(size: int) -> None:
            nonlocal done
            with counting:
                done += size
                on_progress(Progress(done, total))

        # Counts received bytes, from several threads; negative for discarded ones.
        self._count = count
        self._count(0)
        with (
            ThreadPoolExecutor(FILES_AT_ONCE, "weights-file") as self._files,
            ThreadPoolExecutor(self.connections, "weights-range") as self._ranges,
        ):
            manifests = [f for f in files if is_manifest(f.name) and f.size <= MANIFEST_BYTES]
            self._all(self._files, (partial(self._file, file) for file in manifests))
            for file in manifests:
                text = (self.cache.folder / file.name).read_text(encoding="utf-8", errors="replace")
                self._manifest.update(read_manifest(file.name, text))
            rest = sorted(set(files) - set(manifests), key=lambda f: (not is_small(f.name), f.name))
            self._all(self._files, (partial(self._file, file) for file in rest))

    def _all(self, pool: ThreadPoolExecutor, work: Iterable[Callable[[], None]]) -> None:
        """Run all of ``work``; the first failure stops the rest and is raised."""
        futures: list[Future[None]] = [pool.submit(one) for one in work]
        _, pending = wait(futures, return_when=FIRST_EXCEPTION)
        if pending:
            self._failed.set()
            for future in pending:
                future.cancel()
            wait(pending)
        failures = [error for f in futures if not f.cancelled() and (error := f.exception()) is not None]
        if failures:
            self._failed.set()
            # Prefer the failure that caused the stop to the FetchStopped of other threads.
            raise min(failures, key=lambda error: isinstance(error, FetchStopped))

    def _stopped(self) -> bool:
        return self.stop.is_set() or self._failed.is_set()

    def _check_stop(self) -> None:
        if self._stopped():
            raise FetchStopped(f"{self.prefix.url}: fetching was stopped; what has arrived is kept")

    def _file(self, file: RemoteFile) -> None:
        with self._locked(file):
            if self.cache.has(file):
                self._count(file.size)
                return
            expected = self._expected(file)
            target = self.cache.folder / file.name
            # A complete file without a record was copied there, or the process died before it was recorded.
            if target.is_file() and fault(target, expected, self._check_stop) is None:
                self._count(file.size)
            else:
                self._receive(file, expected, target)
            self.cache.checked(file, expected.kind)

    def _receive(self, file: RemoteFile, expected: Expected, target: Path) -> None:
        """Fetch the missing bytes; fetch a file with a wrong checksum once more from the start."""
        wrong: str | None = None
        for _ in range(2):
            with PartFile(self.cache.part(file.name), file) as part:
                self._count(part.received_bytes)
                self._all(self._ranges, (partial(self._range, file, part, *at) for at in part.missing))
                part.sync()
                wrong = fault(part.path, expected, self._check_stop)
                if wrong is None:
                    part.finish(target)
                    return
                part.discard()
                self._count(-file.size)
        raise FetchError(
            f"{self.prefix.url}/{file.name}: {wrong}, twice; the source's file is damaged: upload it again"
        )

    def _range(self, file: RemoteFile, part: PartFile, start: int, end: int) -> None:
        """Fetch one range; after a broken connection, continue at the first missing byte."""
        failures = 0
        while start < end:
            self._check_stop()
            try:
                with closing(self._open(file, start, end)) as body:
                    while chunk := _read(body):
                        part.write(start, chunk)
                        start += len(chunk)
                        failures = 0
                        self._count(len(chunk))
                        self._check_stop()
            except (FetchError, OSError):
                raise
            except Exception as error:  # the client's errors have no common base
                failures += 1
                if not transient(error) or failures >= ATTEMPTS:
                    raise meaning(error, f"{self.prefix.url}/{file.name}") from error
                self.stop.wait(self.backoff_s * 2 ** (failures - 1))

    def _open(self, file: RemoteFile, start: int, end: int) -> Any:
        answer = self.client.get_object(
            **self._key(file), Range=f"bytes={start}-{end - 1}", IfMatch=f'"{file.etag}"'
        )
        if answer["ContentLength"] != end - start:
            answer["Body"].close()
            raise Unreachable(
                f"{self.prefix.url}/{file.name}: the endpoint does not honour byte ranges; "
                "see weights.endpoint_url"
            )
        return answer["Body"]

    def _expected(self, file: RemoteFile) -> Expected:
        if file.name in self._manifest:
            return Expected("sha256", self._manifest[file.name], file.size)

        def part_bytes() -> int | None:
            length = self.client.head_object(**self._key(file), PartNumber=1).get("ContentLength")
            return int(length) if length is not None else None

        try:
            head = self.client.head_object(
                **self._key(file), ChecksumMode="ENABLED", IfMatch=f'"{file.etag}"'
            )
            return from_head(head, file.size, part_bytes)
        except Exception as error:  # the client's errors have no common base
            raise meaning(error, f"{self.prefix.url}/{file.name}") from error

    def _key(self, file: RemoteFile) -> dict[str, str]:
        return {"Bucket": self.prefix.bucket, "Key": self.prefix.start + file.name}

    def _locked(self, file: RemoteFile) -> AbstractContextManager[object]:
        """Lock the file against other threads and processes; the lock ends with its process."""
        try:
            from filelock import FileLock, Timeout
        except ImportError:
            raise FetchError("s3:// needs filelock: pip install 'sluice-gateway[s3]'") from None
        try:
            return FileLock(self.cache.lock(file.name)).acquire(
                poll_interval=LOCK_POLL_S, cancel_check=self._stopped
            )
        except Timeout:
            self._check_stop()
            raise


def _read(body: Any) -> bytes:
    """Read the next chunk; an OSError of the connection becomes a client error, not a disk error."""
    import botocore.exceptions as boto

    try:
        chunk: bytes = body.read(CHUNK_BYTES)
    except OSError as error:
        raise boto.HTTPClientError(error=error) from error
    return chunk
