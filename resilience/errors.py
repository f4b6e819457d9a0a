"""Errors of the attempts on a backend.

::

    ResilienceError
    └── DeadlinePassed      the request's time was up before an answer was whole

How a backend itself fails is :class:`resilience.failures.BackendFailure`, a closed set of its own.
"""


class ResilienceError(Exception):
    """The attempts ended for a reason of their own."""


class DeadlinePassed(ResilienceError):
    """The request's deadline passed before or during an attempt; the attempt has ended.

    Args:
        backend: where the attempt ran, or would have run.
        attempts: attempts begun, 0 when the deadline had passed before the first.
    """

    def __init__(self, *, backend: str, attempts: int) -> None:
        self.backend = backend
        self.attempts = attempts
        super().__init__(f"the deadline passed in attempt {attempts} on backend {backend!r}")
