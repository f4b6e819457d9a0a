"""What the ledger tells: frozen facts for metrics and logs. Times are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LossReason(StrEnum):
    """Why usage rows did not reach the database; stable codes."""

    OUTBOX_FULL = "outbox_full"
    CLOSED = "closed"
    UNWRITABLE = "unwritable"


@dataclass(frozen=True, slots=True)
class RowsWritten:
    """A batch is durable. ``depth`` rows still wait; ``took_s`` is the batch's own time, seconds."""

    count: int
    depth: int
    took_s: float
    at: float


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A batch could not be written; its rows stay and are tried again.

    ``failures`` counts since the last success; ``error_type`` is the exception's class, never its text,
    which may hold a row's values.
    """

    error_type: str
    failures: int
    depth: int
    at: float


@dataclass(frozen=True, slots=True)
class RowsLost:
    """Rows that will never be written. ``generation_ids`` names the first of them (at most 20)."""

    count: int
    reason: LossReason
    generation_ids: tuple[str, ...]
    at: float


class JournalRefusal(StrEnum):
    """Why a row was not journaled; stable codes."""

    FULL = "full"
    FAILING = "failing"
    UNENCODABLE = "unencodable"


@dataclass(frozen=True, slots=True)
class JournalSynced:
    """A group of rows is on the disk, after ``took_s`` seconds."""

    rows: int
    size_bytes: int
    took_s: float
    at: float


@dataclass(frozen=True, slots=True)
class JournalFailed:
    """The disk failed the journal: ``rows`` of one group are in memory alone, until the database has them."""

    error_type: str
    rows: int
    at: float


@dataclass(frozen=True, slots=True)
class JournalRefused:
    """A row is in memory alone, until the database has it."""

    reason: JournalRefusal
    at: float


@dataclass(frozen=True, slots=True)
class RowsReplayed:
    """A journal file's rows are in the database; ``adopted``: another process had left it behind.

    Rows that were there already count too. ``damaged_bytes`` could not be read; the file is set aside then.
    """

    count: int
    adopted: bool
    damaged_bytes: int
    at: float


JournalEvent = JournalSynced | JournalFailed | JournalRefused
LedgerEvent = RowsWritten | WriteFailed | RowsLost | RowsReplayed | JournalEvent
