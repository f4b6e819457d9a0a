"""Failures of the connection between the gateway and a worker."""


class TransportError(Exception):
    """The worker gave no answer. The message contains neither prompt nor key."""


class ConnectFailed(TransportError):
    """No connection could be made: refused, unreachable, unknown name, TLS, timeout.

    ``refused``: the connection was refused or the host is unreachable; not a timeout.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(message)


class ConnectionsInUse(TransportError):
    """The bound on connections to one worker is reached."""


class ConnectionLost(TransportError):
    """The connection ended before the answer did.

    ``untouched``: no byte of an answer was received on a reused connection. Most likely the worker closed it
    while it was idle and did not receive the request.
    """

    def __init__(self, message: str, *, untouched: bool = False) -> None:
        self.untouched = untouched
        super().__init__(message)


class TimedOut(TransportError):
    """The worker was too slow; ``what`` did not come within the limit."""

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__(f"{what} within {limit_s:g} s")


class BadHttp(TransportError):
    """The answer is not HTTP, not valid in OpenAI's contract, or longer than allowed."""
