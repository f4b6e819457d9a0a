"""Why a run of chaos cannot start or continue."""


class ChaosError(Exception):
    """The run cannot start or continue; the message is ready to print.

    ::

        ChaosError
        ├── ScenarioError   the file is invalid
        └── TestbedError    a process cannot be started, reached or found
    """


class ScenarioError(ChaosError):
    """The scenario's file cannot be read, or one of its keys or values is invalid."""


class TestbedError(ChaosError):
    """A process does not start, a gateway does not answer, a role has no process."""
