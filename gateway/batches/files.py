"""Files of callers: uploads, and the results of batches."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import BinaryIO, Final, TypeVar

import structlog

from accounting.batch_tables import FileRow
from accounting.batches import BatchStore
from accounting.errors import LedgerUnavailable
from gateway.batches.storage import FileStorage
from gateway.config.batches import BatchesSection
from gateway.contracts.batches import FileBody
from gateway.contracts.fields import from_attributes
from gateway.contracts.refusals import Readable, given, not_allowed, path_of
from gateway.errors import BackendUnavailable, FileInUse, InvalidRequest, NotFound, QuotaExceeded

T = TypeVar("T")
PURPOSES: Final = ("batch", "user_data", "evals")
"""Purposes of uploads; others are for services that this gateway does not have."""
EXPIRES_S: Final = (3_600, 2_592_000)  # OpenAI's bounds of ``expires_after.seconds``
_UNBOUNDED: Final = 1 << 62
SWEPT_AT_ONCE: Final = 100
UPLOAD_S: Final = 86_400.0
"""Age in seconds from which a content without a row counts as left by a killed gateway."""
SWEEP_CONTENTS_S: Final = 3_600.0
RETRY_MS: Final = 1_000


class Files:
    """A file belongs to its tenant; for other tenants its id is unknown.

    ``store``: the tables of files and batches; ``None``: files are off.
    """

    def __init__(
        self,
        store: BatchStore | None = None,
        storage: FileStorage | None = None,
        section: BatchesSection | None = None,
        unix_time: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.section = section or BatchesSection()
        self._store = store
        self._storage = storage
        self.now = unix_time
        self._contents_swept_at = float("-inf")
        self.submitted = asyncio.Event()
        """Set when this process has a new batch: the runner does not look often while there is none."""
        self._log = structlog.get_logger("gateway.batches")

    @property
    def enabled(self) -> bool:
        return self._store is not None

    @property
    def store(self) -> BatchStore:
        """The tables of files and batches. Raises InvalidRequest where files are off."""
        return _if_on(self._store)

    @property
    def storage(self) -> FileStorage:
        """The storage of contents. Raises InvalidRequest where files are off."""
        return _if_on(self._storage)

    async def add(
        self,
        tenant: str,
        file_id: str,
        filename: str,
        purpose: str,
        source: BinaryIO,
        size: int,
        expires_s: float | None = None,
    ) -> FileRow:
        """Store a file. Raises QuotaExceeded, BackendUnavailable (the storage), LedgerUnavailable."""
        now, section = self.now(), self.section
        row = FileRow(
            file_id, tenant, filename, purpose, size, now, now + (expires_s or section.keep_seconds)
        )
        try:
            await asyncio.to_thread(self.storage.put, file_id, source)
            if await self.store.add_file(row, section.max_tenant_bytes):
                return row
        except OSError as error:
            self._log.error("file not stored", file=file_id, reason=str(error))
            raise BackendUnavailable(
                "the file cannot be stored now: its storage fails", retry_after_ms=RETRY_MS
            ) from error
        except LedgerUnavailable:
            await self._drop(file_id)
            raise
        await self._drop(file_id)
        raise QuotaExceeded(
            f"the tenant's files would take more than {section.max_tenant_bytes} bytes; delete some first"
        )

    async def add_result(self, tenant: str, file_id: str, filename: str, size: int, expires_s: float) -> None:
        """Add a file whose content is stored already, without a quota. Raises LedgerUnavailable."""
        now = self.now()
        row = FileRow(file_id, tenant, filename, "batch_output", size, now, now + expires_s)
        await self.store.add_file(row, _UNBOUNDED)

    async def get(self, tenant: str, file_id: str, param: str = "file_id") -> FileRow:
        """The file. Raises NotFound, LedgerUnavailable."""
        found = await self.store.file(tenant, file_id, self.now())
        if found is None:
            raise NotFound(f"no file '{path_of([file_id])}' is stored", param=param)
        return found

    async def check_key(self, tenant: str, file_id: str) -> None:
        """Raise OSError if the file is encrypted and no key is given: the stored bytes are no content then.

        Raises LedgerUnavailable.
        """
        if (row := await self.store.file(tenant, file_id, self.now())) is not None:
            await asyncio.to_thread(self.storage.check_key, file_id, row.bytes)

    async def content(self, row: FileRow) -> Iterator[bytes]:
        """The content in pieces, of which the first has been read. Raises NotFound, BackendUnavailable."""
        pieces = self.storage.chunks(row.file_id)
        try:
            await asyncio.to_thread(self.storage.check_key, row.file_id, row.bytes)
            return chain([await asyncio.to_thread(next, pieces, b"")], pieces)
        except OSError as error:
            self._log.error("file not read", file=row.file_id, reason=str(error))
            if isinstance(error, FileNotFoundError):
                raise NotFound(f"the content of '{row.file_id}' is gone", param="file_id") from error
            raise BackendUnavailable(
                "the file cannot be read now: its storage fails", retry_after_ms=RETRY_MS
            ) from error

    async def page(
        self, tenant: str, *, after: str | None, limit: int, purpose: str | None, newest: bool
    ) -> list[FileRow]:
        """A page of the tenant's files. Raises NotFound, LedgerUnavailable."""
        last = None if after is None else await self.get(tenant, after, "after")
        return await self.store.list_files(
            tenant, self.now(), after=last, limit=limit, purpose=purpose, newest=newest
        )

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises NotFound, FileInUse, LedgerUnavailable."""
        if await self.store.is_used(tenant, file_id):
            raise FileInUse("a batch that has not ended reads the file; cancel it first", param="file_id")
        if not await self.store.delete_file(tenant, file_id):
            raise NotFound(f"no file '{path_of([file_id])}' is stored", param="file_id")
        await self._drop(file_id)

    async def sweep(self) -> None:
        """Delete expired files, contents without a row, and batches whose results have all expired.

        Raises LedgerUnavailable.
        """
        for row in await self.store.expired_files(self.now(), SWEPT_AT_ONCE):
            await self.store.delete_file(row.tenant, row.file_id)
            await self._drop(row.file_id)
        now = self.now()
        if now - self._contents_swept_at >= SWEEP_CONTENTS_S:
            self._contents_swept_at = now
            # A batch's results are written soon after its window, and kept for one of these times.
            await self.store.delete_ended(
                now - SWEEP_CONTENTS_S - max(self.section.keep_seconds, EXPIRES_S[1])
            )
            try:
                await self._sweep_contents(now - UPLOAD_S)
            except OSError as error:
                self._log.warning("contents not listed", reason=str(error))

    async def _sweep_contents(self, before: float) -> None:
        """Delete contents without a row. Raises LedgerUnavailable, OSError."""
        contents = self.storage.older_than(before)
        while ids := await asyncio.to_thread(lambda: list(islice(contents, SWEPT_AT_ONCE))):
            for file_id in set(ids) - await self.store.known_files(ids):
                await self._drop(file_id)

    async def _drop(self, file_id: str) -> None:
        """Delete a content; one that cannot be deleted now is without a row, and swept later."""
        try:
            await asyncio.to_thread(self.storage.delete, file_id)
        except OSError as error:
            self._log.warning("file not deleted", file=file_id, reason=str(error))


def _if_on(part: T | None) -> T:
    if part is None:
        raise InvalidRequest("files and batches are off here (batches.enabled, or a ledger in memory)")
    return part


def file_body(row: FileRow) -> FileBody:
    return from_attributes(
        FileBody,
        row,
        id=row.file_id,
        object="file",
        created_at=int(row.created_at),
        expires_at=None if row.expires_at is None else int(row.expires_at),
        status="processed",
        status_details=None,
    )


def expiry(anchor: str | None, seconds: str | None) -> float | None:
    """The seconds of a form's ``expires_after``; ``None``: not given. Raises InvalidRequest."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise not_allowed("expires_after[anchor]", shown(anchor), "created_at")
    least, most = EXPIRES_S
    if seconds is None or not seconds.isdecimal() or not least <= float(seconds) <= most:
        raise not_allowed("expires_after[seconds]", shown(seconds), f"{least} to {most}")
    return float(seconds)


def shown(value: str | None) -> str:
    """What an error says about a field of a form."""
    return "is missing" if value is None else f"is {given(Readable(value))}"
