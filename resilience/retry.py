"""Whether a failed attempt is made again on the same backend, and after which wait; sans I/O."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from resilience.events import ResilienceEvent, Retried, RetryRefused
from resilience.failures import BackendFailure, FailureKind
from resilience.retry_budget import CallBudget, RetryBudget

# Up to a tenth is added to each wait, so that requests that failed together do not return together.
JITTER = 0.1


class Attempt(Struct, frozen=True):
    """Which attempt this is, from 1, and what the one before failed with."""

    number: int
    after: FailureKind | None = None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Applies the table of ``resilience.failures`` within the retry budget of all requests together."""

    budget: RetryBudget
    random: random.Random
    emit: Callable[[ResilienceEvent], None]

    def began(self, backend: str, now: float) -> None:
        """The first attempt on ``backend`` is made; it pays for a part of a retry."""
        self.budget.attempted(backend, now)

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
        """Seconds until the next attempt, which is then paid for; ``None`` when there is none.

        The wait doubles, with jitter, and is at least the backend's Retry-After. It never passes ``end``.
        """
        policy = failure.policy
        asked_s = failure.retry_after_s or 0.0
        # A backend that asks for a longer wait than the longest is left alone.
        if failure.final or attempt.number > policy.retries_same or asked_s > policy.longest_wait_s:
            return None
        doubled_s = (
            policy.first_wait_s * 2.0 ** (attempt.number - 1) * (1.0 + self.random.uniform(0.0, JITTER))
        )
        wait_s = max(min(doubled_s, policy.longest_wait_s), asked_s)
        if (end is not None and now + wait_s >= end) or not calls.allows(backend):
            return None
        # Asked last, since asking pays.
        return wait_s if self.affords(backend, failure.kind, attempt.number, now, wait_s) else None

    def affords(self, backend: str, kind: FailureKind, attempt: int, now: float, wait_s: float = 0.0) -> bool:
        """Whether the retry budget has another call to ``backend``; it is paid for then."""
        paid = self.budget.take(backend, now)
        self.emit(Retried(backend, kind, attempt, wait_s) if paid else RetryRefused(backend, kind, attempt))
        return paid
