"""Errors of a replay.

::

    ReplayError
    ├── TraceError      the trace cannot be read
    ├── OptionError     an option's value is not allowed
    └── TargetError     the gateway cannot be used: not reached, key refused, model unknown
"""

from __future__ import annotations


class ReplayError(Exception):
    """A replay cannot begin; the message is for the person at the terminal."""


class TraceError(ReplayError):
    """The trace is missing, empty, or a row of it cannot be read; the message names file and row."""


class OptionError(ReplayError):
    """An option's value is not allowed; the message names the option, the value and what is allowed."""


class TargetError(ReplayError):
    """The gateway did not answer the first calls as it should."""
