"""The guard around ``generate``: retries what can be retried invisibly, never past the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from resilience.classify import classify
from resilience.errors import DeadlinePassed
from resilience.events import AttemptFailed, Recovered, ResilienceEvent, Retried, RetryRefused
from resilience.failures import BackendFailure, FailureKind
from resilience.retry_budget import RetryBudget

T = TypeVar("T")

# Up to a tenth of the wait is added, so that requests that failed together do not return together.
JITTER = 0.1


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt this is, from 1, and what the one before failed with."""

    number: int
    after: FailureKind | None = None


class Guard:
    """Runs attempts on one backend under the policy table of ``resilience.failures``.

    Args:
        clock: seconds, monotonic; deadlines are on it.
        sleep: waits that many seconds.
        random: source of the jitter.
        emit: takes each event; must not block.
        budget: what retries of all requests together may add; one of the usual size when absent.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        random: random.Random,
        emit: Callable[[ResilienceEvent], None],
        budget: RetryBudget | None = None,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._random = random
        self._emit = emit
        self._budget = budget if budget is not None else RetryBudget()

    async def run(
        self,
        attempt: Callable[[Attempt], Awaitable[T]],
        *,
        backend: str,
        delivered: Callable[[], bool],
        deadline: float | None,
        begun: Callable[[], bool] = lambda: True,
        first_token_deadline: float | None = None,
    ) -> T:
        """The result of the first attempt that succeeds.

        A failed attempt is made again on the same backend while all of this holds: its failure's policy
        still permits a retry, nothing of the answer was delivered, the wait before it ends before
        ``deadline``, and the backend's retry budget pays for it. Attempts never overlap: each has ended,
        cleaned up, before this goes on. Until something of an answer has ``begun`` the deadline is
        ``first_token_deadline``, if that is given: it leaves time for something else.

        Raises:
            BackendFailure: the last attempt's failure; any other exception of an attempt is classified.
            DeadlinePassed: the deadline passed before the first attempt or during one, which was
                cancelled and awaited.
        """

        def due() -> float | None:
            return deadline if first_token_deadline is None or begun() else first_token_deadline

        def enough(state: RetryCallState) -> bool:
            failure = _failure(state)
            wait_s = state.upcoming_sleep
            if (
                delivered()
                or failure.final
                or state.attempt_number > failure.policy.retries_same
                # A backend that wants to be left alone for longer than we would wait is better left.
                or (failure.retry_after_s or 0.0) > failure.policy.longest_wait_s
                or ((end := due()) is not None and self._clock() + wait_s >= end)
            ):
                return True
            # Asked last, since asking pays: all else permits the retry.
            if self._budget.take(backend, self._clock()):
                return False
            self._emit(RetryRefused(backend, failure.kind, state.attempt_number))
            return True

        def tell(state: RetryCallState) -> None:
            self._emit(Retried(backend, _failure(state).kind, state.attempt_number, state.upcoming_sleep))

        made = 0
        last: FailureKind | None = None
        first_failure: BackendFailure | None = None

        async def once() -> T:
            nonlocal made, first_failure, last
            if first_failure is not None:
                failure, first_failure = first_failure, None
                raise failure
            if (end := due()) is not None and self._clock() >= end:
                raise DeadlinePassed(backend=backend, attempts=made)
            made += 1
            try:
                return await self._attempt(
                    attempt,
                    Attempt(made, last),
                    backend=backend,
                    delivered=delivered,
                    deadline=deadline,
                    begun=begun,
                    first_token_deadline=first_token_deadline,
                )
            except BackendFailure as failure:
                last = failure.kind
                raise

        self._budget.attempted(backend, self._clock())
        try:
            return await once()
        except BackendFailure as failure:
            first_failure = failure
        # Retrying is set up only after a failure, which is then its first attempt: setting it up costs more
        # than all the rest of a request that succeeds at once.
        retrying = AsyncRetrying(
            sleep=self._sleep,
            retry=retry_if_exception_type(BackendFailure),
            wait=self._wait_s,
            stop=enough,
            before_sleep=tell,
            reraise=True,
        )
        result: T = await retrying(once)
        if last is not None:
            self._emit(Recovered(backend, last, made))
        return result

    def affords(self, backend: str, kind: FailureKind) -> bool:
        """Whether the retry budget has another call of ``backend`` after ``kind``; it is paid for then."""
        paid = self._budget.take(backend, self._clock())
        self._emit(Retried(backend, kind, 1, 0.0) if paid else RetryRefused(backend, kind, 1))
        return paid

    async def _attempt(
        self,
        attempt: Callable[[Attempt], Awaitable[T]],
        this: Attempt,
        *,
        backend: str,
        delivered: Callable[[], bool],
        deadline: float | None,
        begun: Callable[[], bool],
        first_token_deadline: float | None,
    ) -> T:
        limit = None if deadline is None else asyncio.timeout(deadline - self._clock())
        try:
            if limit is None:
                return await attempt(this)
            async with limit:
                with self._looking(limit, first_token_deadline, begun):
                    return await attempt(this)
        except asyncio.CancelledError:
            # Not the deadline, which comes out of `limit` as a TimeoutError.
            kind = FailureKind.CANCELLED_BY_CLIENT
            self._emit(AttemptFailed(backend, kind, this.number, delivered(), "CancelledError"))
            raise
        except Exception as error:
            # Once the time is up, whatever the attempt raised is how it took its cancellation.
            if limit is not None and limit.expired():
                raise DeadlinePassed(backend=backend, attempts=this.number) from error
            failure = classify(error, delivered=delivered())
            error_type = type(failure.__cause__ or failure).__name__
            self._emit(AttemptFailed(backend, failure.kind, this.number, delivered(), error_type))
            if failure is error:
                raise
            raise failure from failure.__cause__

    @contextlib.contextmanager
    def _looking(
        self, limit: asyncio.Timeout, first_token_deadline: float | None, begun: Callable[[], bool]
    ) -> Iterator[None]:
        """Within it ``limit`` ends at ``first_token_deadline`` when nothing has begun then."""
        if first_token_deadline is None or begun():
            yield
            return
        loop = asyncio.get_running_loop()

        def look() -> None:
            if not begun() and not limit.expired():
                limit.reschedule(loop.time())

        timer = loop.call_later(max(0.0, first_token_deadline - self._clock()), look)
        try:
            yield
        finally:
            timer.cancel()

    def _wait_s(self, state: RetryCallState) -> float:
        """Wait before the next attempt, seconds: doubling, with jitter, at least what the backend asked."""
        failure = _failure(state)
        policy = failure.policy
        doubled = policy.first_wait_s * 2.0 ** (state.attempt_number - 1)
        jittered = doubled * (1.0 + self._random.uniform(0.0, JITTER))
        return max(min(jittered, policy.longest_wait_s), failure.retry_after_s or 0.0)


def _failure(state: RetryCallState) -> BackendFailure:
    error = state.outcome.exception() if state.outcome is not None else None
    if not isinstance(error, BackendFailure):
        raise TypeError(f"tenacity asked about {type(error).__name__}, which is never retried")
    return error
