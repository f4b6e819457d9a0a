"""Files, batches and their lines: the rows, and the tables that hold them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Column, Double, Index, LargeBinary, PrimaryKeyConstraint, Table, Text

from accounting.tables import columns_of, metadata


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of a tenant; its content is in the file storage."""

    file_id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: float
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch.

    Args:
        key_id, own_salt: the key whose rights the lines have; the cache salt whose prefixes they share.
        ending: the status after all lines have ended: completed, expired or cancelled.
        body: the fields that only clients read, encoded by the caller.
    """

    batch_id: str
    tenant: str
    key_id: str
    own_salt: str | None
    endpoint: str
    input_file_id: str
    status: str
    created_at: float
    expires_at: float
    body: bytes
    ending: str | None = None
    total: int = 0


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of an input file: ``number`` counts from 1; ``start`` (offset) and ``size`` are in bytes.

    ``place`` is the position in the order of execution, which puts lines with a common prefix together.

    ``takeovers`` counts the gateways that ended while they ran the line, ``failures`` the backend failures.
    """

    batch_id: str
    place: int
    number: int
    custom_id: str
    start: int
    size: int
    takeovers: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class LineTokens:
    """The tokens of a line's answer, or of all lines of a batch."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """The lines of a batch by status, and their tokens."""

    by_status: Mapping[str, int] = field(default_factory=dict)
    tokens: LineTokens = LineTokens()

    def of(self, *statuses: str) -> int:
        return sum(self.by_status.get(one, 0) for one in statuses)


files = Table(
    "files",
    metadata,
    *columns_of(FileRow),
    PrimaryKeyConstraint("file_id"),
    Index("ix_files_tenant_created_at", "tenant", "created_at"),
    Index("ix_files_expires_at", "expires_at"),
)
batches = Table(
    "batches",
    metadata,
    *columns_of(BatchRow),
    # The gateway that validates or finishes the batch, and the end of its lease.
    Column("owner", Text),
    Column("lease_until", Double),
    PrimaryKeyConstraint("batch_id"),
    Index("ix_batches_tenant_created_at", "tenant", "created_at"),
    Index("ix_batches_status", "status"),
)
lines = Table(
    "batch_lines",
    metadata,
    *columns_of(BatchLine),
    Column("status", Text, nullable=False),
    Column("owner", Text),
    Column("lease_until", Double),
    Column("output", LargeBinary),
    *columns_of(LineTokens),
    PrimaryKeyConstraint("batch_id", "place"),
    Index("ix_batch_lines_batch_id_status_place", "batch_id", "status", "place"),
    Index("ix_batch_lines_owner", "owner"),
)
