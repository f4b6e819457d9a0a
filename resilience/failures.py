"""The closed set of ways in which a backend can fail, and what each one means.

Sources: seed 001 (retry table, recovery strategies) and the public surface's list of reasons. Every
backend raises :class:`BackendFailure` with one of these kinds and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class FailureKind(StrEnum):
    """Stable codes; they appear as ``fallback.reason``, in metrics and in the ledger."""

    CUDA_OOM = "cuda_oom"
    CUDA_DRIVER_ERROR = "cuda_driver_error"
    ENGINE_DEAD = "engine_dead"
    PREEMPTED = "preempted"
    NAN_OUTPUT = "nan_output"
    TIMEOUT = "timeout"
    WORKER_RESTARTED = "worker_restarted"
    THROTTLED = "throttled"
    BACKEND_UNAVAILABLE = "backend_unavailable"
    STREAM_BROKEN = "stream_broken"
    INVALID_INPUT = "invalid_input"
    MODEL_NOT_FOUND = "model_not_found"
    TOKEN_LIMIT_EXCEEDED = "token_limit_exceeded"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What a failure permits.

    Args:
        retries_same: tries again on the same backend before anything was delivered (seed 001).
        other_backend: whether another backend could do better with the same request.
        first_wait_s: wait before the first retry, seconds; doubles up to ``longest_wait_s``.
        longest_wait_s: upper bound of the wait, seconds.
    """

    retries_same: int
    other_backend: bool
    first_wait_s: float = 0.0
    longest_wait_s: float = 0.0


POLICIES: Mapping[FailureKind, FailurePolicy] = MappingProxyType(
    {
        FailureKind.CUDA_OOM: FailurePolicy(3, True, 0.1, 5.0),
        FailureKind.CUDA_DRIVER_ERROR: FailurePolicy(0, True),
        FailureKind.ENGINE_DEAD: FailurePolicy(0, True),
        FailureKind.PREEMPTED: FailurePolicy(3, True, 0.1, 5.0),
        FailureKind.NAN_OUTPUT: FailurePolicy(1, True, 0.1, 0.1),
        FailureKind.TIMEOUT: FailurePolicy(2, True, 1.0, 10.0),
        FailureKind.WORKER_RESTARTED: FailurePolicy(2, True, 5.0, 5.0),
        FailureKind.THROTTLED: FailurePolicy(0, True),
        FailureKind.BACKEND_UNAVAILABLE: FailurePolicy(0, True),
        FailureKind.STREAM_BROKEN: FailurePolicy(0, True),
        FailureKind.INVALID_INPUT: FailurePolicy(0, False),
        FailureKind.MODEL_NOT_FOUND: FailurePolicy(0, True),
        FailureKind.TOKEN_LIMIT_EXCEEDED: FailurePolicy(0, False),
        FailureKind.INTERNAL: FailurePolicy(0, True),
    }
)


class BackendFailure(Exception):
    """A backend could not answer.

    Args:
        kind: the closed code.
        message: what an operator should read; never prompt text, never a secret.
        retry_after_s: seconds after which the backend may be able again, when it said so.
        param: the field of the request at fault, when it is one.
    """

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> None:
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.param = param
        super().__init__(message)

    @property
    def policy(self) -> FailurePolicy:
        """What this failure permits."""
        return POLICIES[self.kind]
