"""The policy for volatile content in callers' system texts."""

from enum import StrEnum


class VolatilePolicy(StrEnum):
    """What to do with volatile content in callers' system texts."""

    MOVE = "move"
    REPORT = "report"
    OFF = "off"
