"""What is done with volatile content that a caller left in the system text."""

from __future__ import annotations

from enum import StrEnum


class VolatilePolicy(StrEnum):
    """What to do with volatile content in callers' system texts."""

    MOVE = "move"
    REPORT = "report"
    OFF = "off"
