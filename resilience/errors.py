"""Errors of the attempts on a backend.

::

    ResilienceError
    └── DeadlinePassed      the request's deadline passed before its answer was complete

Failures of a backend are :class:`resilience.failures.BackendFailure`, a separate closed set.
"""


class ResilienceError(Exception):
    """The attempts ended for a reason that is not a failure of the backend."""


class DeadlinePassed(ResilienceError):
    """The request's deadline passed before or during an attempt; the attempt has ended.

    Args:
        backend: the backend on which the attempt ran, or would have run.
        attempts: attempts begun; 0 when the deadline had passed before the first one.
    """

    def __init__(self, *, backend: str, attempts: int) -> None:
        super().__init__(f"the deadline passed in attempt {attempts} on backend {backend!r}")
