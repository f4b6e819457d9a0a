"""Errors of the admission stage.

::

    AdmissionError
    └── Refused     the request may not go to its backend now
"""

from admission.values import Reason


class AdmissionError(Exception):
    """Admission did not let a request through."""


class Refused(AdmissionError):
    """The request was refused for ``reason``; ``waited_s`` is how long it was queued before, ``checked_s``
    the part of its time until the deadline that went into checks. Times in seconds."""

    def __init__(
        self,
        reason: Reason,
        *,
        estimated_wait_s: float,
        retry_after_s: float,
        waited_s: float = 0.0,
        checked_s: float = 0.0,
    ) -> None:
        self.reason = reason
        self.estimated_wait_s = estimated_wait_s
        self.retry_after_s = retry_after_s
        self.waited_s = waited_s
        self.checked_s = checked_s
        super().__init__(f"{reason.value} (estimated wait {estimated_wait_s:.2f} s)")
