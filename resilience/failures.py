"""The closed set of kinds of backend failures, and the policy for each.

The waits match how long each kind of failure usually lasts. A backend raises only :class:`BackendFailure`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """Stable codes of failures; they appear as ``fallback.reason``, in metrics and in the ledger.

    ``docs/resilience.md`` says what each means.
    """

    CUDA_OOM = "cuda_oom"
    CUDA_DRIVER_ERROR = "cuda_driver_error"
    ENGINE_DEAD = "engine_dead"
    PREEMPTED = "preempted"
    NAN_OUTPUT = "nan_output"
    DEGENERATE_OUTPUT = "degenerate_output"
    TIMEOUT = "timeout"
    WORKER_RESTARTED = "worker_restarted"
    THROTTLED = "throttled"
    BACKEND_UNAVAILABLE = "backend_unavailable"
    STREAM_BROKEN = "stream_broken"
    ACCESS_DENIED = "access_denied"
    INVALID_INPUT = "invalid_input"
    MODEL_NOT_FOUND = "model_not_found"
    TOKEN_LIMIT_EXCEEDED = "token_limit_exceeded"
    CANCELLED_BY_CLIENT = "cancelled_by_client"
    INTERNAL = "internal"


class HealthEffect(StrEnum):
    """What a failure says about the backend."""

    NOTHING = "nothing"  # the request or its sender is at fault
    COUNTS_AGAINST = "counts_against"  # a failed answer in the rate that opens its circuit
    SHRINK_LOAD = "shrink_load"  # the same, and the backend should get less load for a while
    RESTART_ENGINE = "restart_engine"  # its process must be replaced; not counted for the circuit
    MISCONFIGURED = "misconfigured"  # a failed answer; an operator must change the configuration


class Remedy(StrEnum):
    """What the next attempt on the same backend does differently."""

    NOTHING = "nothing"
    SHORTER_CONTEXT = "shorter_context"
    OTHER_SEED = "other_seed"


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """The reactions that a failure permits.

    Args:
        retries_same: retries on the same backend while nothing has been delivered.
        other_backend: whether another backend may succeed with the same request.
        resumes: whether an answer that this failure interrupted may be resumed.
        first_wait_s: wait before the first retry, seconds; doubles up to ``longest_wait_s``.
    """

    health: HealthEffect
    retries_same: int = 0
    first_wait_s: float = 0.0
    longest_wait_s: float = 0.0
    retry_with: Remedy = Remedy.NOTHING
    other_backend: bool = True
    resumes: bool = True


# The others do not count in the failure rate; a dead engine's restart resets it.
_COUNTED = frozenset({HealthEffect.COUNTS_AGAINST, HealthEffect.SHRINK_LOAD, HealthEffect.MISCONFIGURED})

# Retries on the same backend, their first and longest wait, seconds.
_THREE_RETRIES = (3, 0.1, 5.0)
_ONE_RETRY = (1, 0.1, 0.1)
_FAILED_ANSWER = FailurePolicy(HealthEffect.COUNTS_AGAINST)
_OF_THE_REQUEST = FailurePolicy(HealthEffect.NOTHING, other_backend=False, resumes=False)

POLICIES: Mapping[FailureKind, FailurePolicy] = {
    FailureKind.CUDA_OOM: FailurePolicy(
        HealthEffect.SHRINK_LOAD, *_THREE_RETRIES, retry_with=Remedy.SHORTER_CONTEXT
    ),
    # What the process computes can no longer be trusted.
    FailureKind.CUDA_DRIVER_ERROR: FailurePolicy(HealthEffect.RESTART_ENGINE),
    FailureKind.ENGINE_DEAD: FailurePolicy(HealthEffect.RESTART_ENGINE),
    FailureKind.PREEMPTED: FailurePolicy(HealthEffect.COUNTS_AGAINST, *_THREE_RETRIES),
    FailureKind.NAN_OUTPUT: FailurePolicy(
        HealthEffect.COUNTS_AGAINST, *_ONE_RETRY, retry_with=Remedy.OTHER_SEED
    ),
    # Prompts can ask for repetition: a tenant that does so must not be able to open the circuit for others.
    # The rest of a repetition repeats too.
    FailureKind.DEGENERATE_OUTPUT: FailurePolicy(
        HealthEffect.NOTHING, *_ONE_RETRY, retry_with=Remedy.OTHER_SEED, resumes=False
    ),
    FailureKind.TIMEOUT: FailurePolicy(HealthEffect.COUNTS_AGAINST, 2, 1.0, 10.0),
    FailureKind.WORKER_RESTARTED: FailurePolicy(HealthEffect.COUNTS_AGAINST, 2, 5.0, 5.0),
    FailureKind.THROTTLED: _FAILED_ANSWER,
    FailureKind.BACKEND_UNAVAILABLE: _FAILED_ANSWER,
    FailureKind.STREAM_BROKEN: _FAILED_ANSWER,
    FailureKind.ACCESS_DENIED: FailurePolicy(HealthEffect.MISCONFIGURED),
    FailureKind.INVALID_INPUT: _OF_THE_REQUEST,
    # Perhaps only one tenant's adapter is missing, which must not open the circuit for other tenants.
    FailureKind.MODEL_NOT_FOUND: FailurePolicy(HealthEffect.NOTHING),
    FailureKind.TOKEN_LIMIT_EXCEEDED: _OF_THE_REQUEST,
    FailureKind.CANCELLED_BY_CLIENT: _OF_THE_REQUEST,
    FailureKind.INTERNAL: _FAILED_ANSWER,
}


class BackendFailure(Exception):
    """A backend could not answer.

    Args:
        kind: the closed code.
        message: for an operator; never contains prompt text or a secret.
        retry_after_s: the backend's Retry-After, seconds.
        param: the field of the request that is at fault.
        no_retry_here: the same backend is not asked again, whatever the policy permits.
        isolated: only a part of the backend failed, and the rest still serves.
    """

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
        no_retry_here: bool = False,
        isolated: bool = False,
    ) -> None:
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.param = param
        self.no_retry_here = no_retry_here
        self.isolated = isolated
        super().__init__(message)

    @property
    def policy(self) -> FailurePolicy:
        return POLICIES[self.kind]

    @property
    def counts(self) -> bool:
        """Whether the failure counts against the backend's circuit."""
        return self.policy.health in _COUNTED and not self.isolated


class CannotResume(BackendFailure):
    """A backend cannot resume a partial answer, or repeated it in other words; it may make a new one."""

    def __init__(self, message: str) -> None:
        super().__init__(FailureKind.STREAM_BROKEN, message)


def invalid_input(message: str, param: str | None = None) -> BackendFailure:
    """The failure for a request that the backend cannot take."""
    return BackendFailure(FailureKind.INVALID_INPUT, message, param=param)
