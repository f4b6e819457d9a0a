"""Why a run of chaos cannot start or continue."""


class ChaosError(Exception):
    """The run cannot start or continue: the file, a process or the gateway; the message is ready to print."""
