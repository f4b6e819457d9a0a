"""What keeps a run of chaos from beginning, or from going on."""

from __future__ import annotations


class ChaosError(Exception):
    """The run cannot be made; the message is ready to print.

    ::

        ChaosError
        ├── ScenarioError   the file is wrong
        └── RigError        what it needs cannot be started, reached or found
    """


class ScenarioError(ChaosError):
    """The scenario's file cannot be read, or a key or value of it is wrong."""


class RigError(ChaosError):
    """A process does not start, a gateway does not answer, a role has no process."""
