"""What the guard tells: frozen facts for metrics, spans and logs."""

from __future__ import annotations

from dataclasses import dataclass

from resilience.failures import FailureKind


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt ended in a failure.

    ``attempt`` counts from 1; ``delivered`` tells whether the caller had got something of the answer by
    then; ``error_type`` is the class of the exception behind the failure.
    """

    backend: str
    kind: FailureKind
    attempt: int
    delivered: bool
    error_type: str


@dataclass(frozen=True, slots=True)
class Retried:
    """Attempt ``attempt`` failed with ``kind``; the next one begins on the same backend in ``wait_s``."""

    backend: str
    kind: FailureKind
    attempt: int
    wait_s: float


ResilienceEvent = AttemptFailed | Retried
