"""Events of failures and of the reactions to them, for metrics, spans and logs."""

from dataclasses import dataclass

from resilience.degenerate import Sign
from resilience.failures import FailureKind


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt ended in a failure.

    ``attempt`` counts from 1; ``delivered``: whether the caller had a part of the answer; ``error_type``: the
    class of the exception that caused it. A caller's disconnect ends it with ``cancelled_by_client``.
    """

    backend: str
    kind: FailureKind
    attempt: int
    delivered: bool
    error_type: str


@dataclass(frozen=True, slots=True)
class Retried:
    """An attempt failed with ``kind``; a further one follows on the same backend."""

    backend: str
    kind: FailureKind


@dataclass(frozen=True, slots=True)
class RetryRefused:
    """An attempt failed with ``kind`` and is not repeated, because the retry budget is empty."""

    backend: str
    kind: FailureKind


@dataclass(frozen=True, slots=True)
class Recovered:
    """An attempt succeeded after the one before had failed with ``kind``."""

    backend: str
    kind: FailureKind


@dataclass(frozen=True, slots=True)
class LoadScaled:
    """A backend's share of its usual load has changed: less after it ran out of memory, more later.

    ``backend`` is the engine's name where several backends share one.
    """

    backend: str
    factor: float
    shrunk: bool


@dataclass(frozen=True, slots=True)
class Degenerated:
    """An answer was found degenerate after ``tokens``, and ``action`` was taken: retry, end, abort."""

    backend: str
    sign: Sign
    action: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A call resumed an answer after its first ``tokens``.

    ``mode`` is ``exact``, ``spelled`` or ``text``. ``result`` is ``whole`` if the call completed the answer,
    ``broken`` if it failed as well, ``cut`` if the caller disconnected or the deadline passed.
    """

    source: str
    target: str
    mode: str
    result: str
    tokens: int


ResilienceEvent = AttemptFailed | Retried | RetryRefused | Recovered | LoadScaled | Degenerated | Resumed
