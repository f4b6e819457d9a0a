"""Events of the ledger and of keys' limits, for metrics and logs."""

import errno
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct


def error_kind(error: BaseException | None) -> str:
    """The class of an error, or of the driver's error in it, with SQLite's or the system's name of the cause.

    SQLAlchemy's classes for PostgreSQL are only ``Error``, so there it is the class of the server's error.

    Its text is left out: it may contain a row's values.
    """
    inner = getattr(error, "orig", None) or error
    from_server = getattr(inner, "__cause__", None)
    if getattr(from_server, "sqlstate", None) is not None:
        inner = from_server
    number = getattr(inner, "errno", None)
    cause = getattr(inner, "sqlite_errorname", None) or errno.errorcode.get(number or 0)
    return " ".join(filter(None, (type(inner).__name__, cause)))


@dataclass(frozen=True, slots=True)
class LoginFailed:
    """A request had a wrong key; ``throttled``: its address has sent too many wrong keys before."""

    throttled: bool


@dataclass(frozen=True, slots=True)
class QuotaDecided:
    """A limit on ``request`` or ``tokens`` was checked. ``refused_by`` is the name of the exceeded limit,
    ``None`` when the request is allowed; ``shared`` is false when this process decided alone.
    """

    kind: str
    refused_by: str | None
    shared: bool


@dataclass(frozen=True, slots=True)
class QuotaSettled:
    """A request of a limited key has ended: the tokens held for it, and the tokens it used."""

    held: int
    used: int


@dataclass(frozen=True, slots=True)
class LimitStoreAnswered:
    """The shared store took ``took_s`` seconds to decide."""

    took_s: float


@dataclass(frozen=True, slots=True)
class LimitStoreMissed:
    """The shared store did not decide; ``reason`` is ``timeout`` or ``unavailable``."""

    reason: str


@dataclass(frozen=True, slots=True)
class SettlementsLost:
    """Settlements that will never reach the shared store: too many waited for it."""

    count: int


QuotaEvent = QuotaDecided | QuotaSettled | LimitStoreAnswered | LimitStoreMissed | SettlementsLost


class LossReason(StrEnum):
    """Why usage rows did not reach the database; stable codes."""

    OUTBOX_FULL = "outbox_full"
    CLOSED = "closed"
    UNWRITABLE = "unwritable"


@dataclass(frozen=True, slots=True)
class RowsWritten:
    """``count`` rows of a batch are in the database."""

    count: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A batch could not be written and is tried again. ``failures`` counts since the last success;
    ``error_type`` is its :func:`error_kind`.
    """

    error_type: str
    failures: int
    depth: int


@dataclass(frozen=True, slots=True)
class DatabaseIsBack:
    """The ledger's database works again after ``failures`` failed calls."""

    failures: int


@dataclass(frozen=True, slots=True)
class RowsLost:
    """Rows that will never be written. ``generation_ids`` names the first of them (at most 20)."""

    count: int
    reason: LossReason
    generation_ids: tuple[str, ...]


class JournalRefusal(StrEnum):
    """Why a row was not journaled; stable codes."""

    FULL = "full"
    FAILING = "failing"
    UNENCODABLE = "unencodable"


class JournalSynced(Struct, frozen=True):
    """A group of rows was synced to disk in ``took_s`` seconds."""

    rows: int
    took_s: float


@dataclass(frozen=True, slots=True)
class JournalFailed:
    """The journal could not be written: the ``rows`` (a number) of one group are in memory only."""

    error_type: str
    rows: int


@dataclass(frozen=True, slots=True)
class JournalIsBack:
    """The journal works again after a failure."""


@dataclass(frozen=True, slots=True)
class JournalRefused:
    """A row was not journaled; it is in memory only until it is in the database."""

    reason: JournalRefusal


@dataclass(frozen=True, slots=True)
class RowsReplayed:
    """All ``count`` rows of a journal file are in the database, some perhaps since before. ``adopted``: the
    file is of an ended process. ``damaged_bytes`` could not be read; such a file is set aside.
    """

    count: int
    adopted: bool
    damaged_bytes: int


JournalEvent = JournalSynced | JournalFailed | JournalIsBack | JournalRefused
LedgerEvent = RowsWritten | WriteFailed | DatabaseIsBack | RowsLost | RowsReplayed | JournalEvent
