"""Errors of the admission stage.

::

    AdmissionError
    └── Refused     the request may not go to its backend now
"""

import math

from admission.values import Reason


class AdmissionError(Exception):
    """Admission did not let a request through."""


class Refused(AdmissionError):
    """The request was refused for ``reason``; ``waited_s`` is how long it was queued before, ``checked_s``
    the part of its time until the deadline that went into checks. ``first_token_s``: when its first token was
    expected, if it was refused because of that alone. Times in seconds."""

    def __init__(
        self,
        reason: Reason,
        *,
        estimated_wait_s: float,
        retry_after_s: float,
        waited_s: float = 0.0,
        checked_s: float = 0.0,
        first_token_s: float | None = None,
    ) -> None:
        self.reason = reason
        self.estimated_wait_s = estimated_wait_s
        self.retry_after_s = retry_after_s
        self.waited_s = waited_s
        self.checked_s = checked_s
        # In milliseconds, rounded up, like a caller's deadline: 4 ms are not "0.00 s".
        expected = f"estimated wait {math.ceil(estimated_wait_s * 1_000)} ms"
        if first_token_s is not None:
            expected = f"first token expected after {math.ceil(first_token_s * 1_000)} ms"
        super().__init__(f"{reason.value} ({expected})")
