"""What is done about a degenerate answer."""

from __future__ import annotations

from enum import StrEnum


class Action(StrEnum):
    """What becomes of an answer that has become nonsense.

    ``retry``: once more with another seed while nothing was given out and the request samples, else ``end``.
    ``end``: the answer ends here, with what there is and finish reason ``error``. ``abort``: it fails.
    """

    RETRY = "retry"
    END = "end"
    ABORT = "abort"
    OFF = "off"
