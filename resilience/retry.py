"""Decides whether a failed attempt is repeated on the same backend, and after which wait; sans I/O."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from msgspec import Struct

from resilience.events import ResilienceEvent, Retried, RetryRefused
from resilience.failures import BackendFailure, FailureKind
from resilience.retry_budget import CallBudget, RetryBudget

# Up to a tenth is added to each wait, so that requests that failed together do not return together.
JITTER = 0.1


class Attempt(Struct, frozen=True):
    """The number of an attempt, from 1, and the failure of the attempt before."""

    number: int
    after: FailureKind | None = None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Applies the failure policies of ``resilience.failures``, within the retry budget of all requests."""

    budget: RetryBudget
    random: Random
    emit: Callable[[ResilienceEvent], None]

    def wait_s(
        self,
        failure: BackendFailure,
        attempt: Attempt,
        *,
        backend: str,
        calls: CallBudget,
        now: float,
        end: float | None,
    ) -> float | None:
        """Seconds until the next attempt, which is taken from the retry budget; ``None``: no further attempt.

        The wait doubles, with jitter, and is at least the backend's Retry-After. It ends before ``end``.
        """
        policy = failure.policy
        asked_s = failure.retry_after_s or 0.0
        # No retry if the backend asks for a wait above the longest one.
        if failure.no_retry_here or attempt.number > policy.retries_same or asked_s > policy.longest_wait_s:
            return None
        doubled_s = (
            policy.first_wait_s * 2.0 ** (attempt.number - 1) * (1.0 + self.random.uniform(0.0, JITTER))
        )
        wait_s = max(min(doubled_s, policy.longest_wait_s), asked_s)
        if (end is not None and now + wait_s >= end) or not calls.allows(backend):
            return None
        # This check comes last, since it takes a retry from the budget.
        return wait_s if self.affords(backend, failure.kind, now) else None

    def affords(self, backend: str, kind: FailureKind, now: float) -> bool:
        """Take another call to ``backend`` from the retry budget; returns whether it has one."""
        paid = self.budget.take(backend, now)
        self.emit(Retried(backend, kind) if paid else RetryRefused(backend, kind))
        return paid
