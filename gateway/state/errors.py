"""Errors of the state store.

::

    StateError
    ├── Conflict           another writer appended first
    ├── StateUnavailable   the store does not answer, is locked, or refuses
    └── RecordTooLarge     a record is longer than a store accepts

Messages name streams and numbers, never a record's content or the password of a url.
"""

from typing import ClassVar

from gateway.errors import InvalidRequest


class StateError(Exception):
    """The state store cannot be read or written; ``code`` is stable."""

    code: ClassVar[str] = "state_error"


class Conflict(StateError):
    """The stream's last record is not the one that the writer expected; nothing was written."""

    code: ClassVar[str] = "state_conflict"

    def __init__(self, stream: str, expected: int, found: int) -> None:
        self.expected = expected
        self.found = found
        super().__init__(
            f"stream {stream!r}: given {expected} as the last record, found {found}; read what came between "
            "and decide again"
        )


class StateUnavailable(StateError):
    """The operation failed.

    After an append it is unknown whether the record was written, unless ``writes_refused``: read before
    appending again. With ``expected`` a second append is safe: it raises :class:`Conflict` when the first one
    was written.
    ``writes_refused``: the store answers but is full, locked, read-only or lacks records; it wrote nothing.
    """

    code: ClassVar[str] = "state_unavailable"

    def __init__(self, operation: str, reason: str, *, writes_refused: bool = False) -> None:
        self.reason = reason
        self.writes_refused = writes_refused
        super().__init__(f"state store: {operation} failed ({reason})")

    def doubt(self, look_at: str) -> str:
        """Whether the change was made, for the operator."""
        if self.writes_refused:
            return "nothing was changed"
        return f"the change may or may not have been made: look at {look_at} before you try again"


class RecordTooLarge(StateError, InvalidRequest, status=422, code=InvalidRequest.code):
    """The record is longer than ``allowed`` bytes, as what the operator has sent is; nothing was written."""

    def __init__(self, stream: str, size: int, allowed: int) -> None:
        super().__init__(f"{stream}: the change is a record of {size} bytes; allowed: {allowed}")
