"""The attempts on one backend: repeated while the caller has no part of the answer, until the deadline."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from msgspec import Struct

from resilience.classify import classify
from resilience.errors import DeadlinePassed
from resilience.events import AttemptFailed, Recovered, ResilienceEvent
from resilience.failures import BackendFailure, FailureKind
from resilience.retry import Attempt, RetryPolicy
from resilience.retry_budget import CallBudget
from resilience.time_limits import TimeLimit, TimeLimits

T = TypeVar("T")


class AttemptBounds(Struct, frozen=True):
    """The limits of one request's attempts on one backend.

    Args:
        calls: the request's call budget; each attempt takes one call.
        delivered: whether the caller has received a part of the answer from these attempts.
        begun: whether there is any output.
        deadline: when the attempts must end, in seconds on the monotonic clock.
        first_token_deadline: the deadline until there is output; it leaves time for a fallback.
        has_others: whether another backend may be asked after these attempts.
    """

    backend: str
    calls: CallBudget
    delivered: Callable[[], bool]
    begun: Callable[[], bool]
    deadline: float
    first_token_deadline: float
    has_others: Callable[[], bool] = lambda: False

    @property
    def end(self) -> float:
        return self.deadline if self.begun() else self.first_token_deadline

    def moved_since(self, end: float) -> float:
        return self.end - end


@dataclass(frozen=True, slots=True)
class RetryLoop:
    """Runs attempts on one backend as :class:`resilience.retry.RetryPolicy` decides.

    ``clock`` returns monotonic seconds; deadlines are times of this clock.
    """

    policy: RetryPolicy
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    emit: Callable[[ResilienceEvent], None]
    limits: TimeLimits = field(default_factory=TimeLimits, init=False)

    def affords(self, backend: str, kind: FailureKind) -> bool:
        """Take a call to ``backend`` after ``kind`` from the retry budget; return whether it has one."""
        return self.policy.affords(backend, kind, self.clock())

    async def run(self, attempt: Callable[[Attempt], Awaitable[T]], bounds: AttemptBounds) -> T:
        """Return the result of the first attempt that succeeds.

        There is no further attempt once a part of the answer was delivered. Attempts never overlap: each has
        ended and cleaned up before the next.

        Raises:
            BackendFailure: the last attempt's failure; any other exception of an attempt is classified.
            DeadlinePassed: the deadline passed before the first attempt or during one, which was
                cancelled and awaited.
        """
        backend, calls = bounds.backend, bounds.calls
        self.policy.budget.attempted(backend, self.clock())
        this = Attempt(1)
        while True:
            if (now := self.clock()) >= bounds.end:
                raise DeadlinePassed(backend=backend, attempts=this.number - 1)
            if not calls.take(backend):
                raise BackendFailure(
                    FailureKind.BACKEND_UNAVAILABLE, "the request has made all its calls", isolated=True
                )
            # This attempt may discard the output of the one before.
            end = min(bounds.end, max(bounds.first_token_deadline, now))
            limit = TimeLimit(self.limits, end - now, partial(bounds.moved_since, end))
            try:
                with limit:
                    result = await attempt(this)
            except asyncio.CancelledError:
                # The caller's cancellation; an expired deadline leaves `limit` as a TimeoutError.
                self._failed(FailureKind.CANCELLED_BY_CLIENT, this, bounds, "CancelledError")
                raise
            except Exception as error:
                # After the deadline, any error of the attempt is a consequence of its cancellation.
                if limit.expired:
                    raise DeadlinePassed(backend=backend, attempts=this.number) from error
                failure = classify(error, delivered=bounds.delivered())
                self._failed(failure.kind, this, bounds, type(failure.__cause__ or failure).__name__)
                wait_s = None
                if not bounds.delivered():
                    failed_at = self.clock()
                    # An attempt with less time than this one took would keep that time from another backend.
                    end = bounds.end - (failed_at - now if bounds.has_others() else 0.0)
                    wait_s = self.policy.wait_s(
                        failure, this, backend=backend, calls=calls, now=failed_at, end=end
                    )
                if wait_s is None and failure is error:
                    raise
                if wait_s is None:
                    raise failure from failure.__cause__
                after = failure.kind
            else:
                if this.after is not None:
                    self.emit(Recovered(backend, this.after))
                return result
            await self.sleep(wait_s)
            this = Attempt(this.number + 1, after)

    def _failed(self, kind: FailureKind, this: Attempt, bounds: AttemptBounds, error_type: str) -> None:
        self.emit(AttemptFailed(bounds.backend, kind, this.number, bounds.delivered(), error_type))
