"""Errors that prevent or end a chaos run."""

from __future__ import annotations


class ChaosError(Exception):
    """The run cannot be made; the message is ready to print.

    ::

        ChaosError
        ├── ScenarioError   the file is invalid
        └── TestbedError    a process cannot be started, reached or found
    """


class ScenarioError(ChaosError):
    """The scenario's file cannot be read, or a key or value of it is wrong."""


class TestbedError(ChaosError):
    """A process does not start, a gateway does not answer, a role has no process."""
