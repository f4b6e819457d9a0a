"""What can go wrong between the gateway and a worker, below the meaning of an answer.

::

    TransportError
    ├── ConnectFailed      no connection: refused, unreachable, no name, TLS, too slow
    ├── ConnectionsInUse   as many connections to this worker as may be
    ├── ConnectionLost     it ended before the answer did
    ├── TimedOut           connected, and then too slow; ``what`` names which limit
    └── BadHttp            what came is no answer: not HTTP, the wrong type, longer than allowed
"""

from __future__ import annotations


class TransportError(Exception):
    """The worker gave no answer. The message names no prompt and no key."""


class ConnectFailed(TransportError):
    """No connection could be made.

    Args:
        message: what happened.
        refused: nobody listens there, or the way there is closed; it was not merely slow.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(message)


class ConnectionsInUse(TransportError):
    """The bound on connections to one worker is reached."""


class ConnectionLost(TransportError):
    """The connection ended before the answer did.

    Args:
        message: what happened.
        untouched: nothing of an answer had come, on a connection that had served before: most likely the
            worker closed it while it was idle, and never saw the request.
    """

    def __init__(self, message: str, *, untouched: bool = False) -> None:
        self.untouched = untouched
        super().__init__(message)


class TimedOut(TransportError):
    """The worker was too slow; ``what`` is ``first token``, ``idle stream``, ``total`` or ``answer``."""

    def __init__(self, what: str, limit_s: float) -> None:
        self.what = what
        super().__init__(f"{what} timeout after {limit_s:g} s")


class BadHttp(TransportError):
    """What came is not an answer in OpenAI's contract."""
