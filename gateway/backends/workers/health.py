"""Whether a worker may get requests, from its probes and from its requests' outcomes; sans-I/O.

::

    new ──probe ok──▶ in service ──failures──▶ ejected ──probe failed once the time is up──▶ ejected, longer
                          ▲                       │
                          └──── probe ok once the time is up, or when no other is in service; slow start
"""

from collections import deque
from enum import StrEnum

from gateway.config.backends import OpenAIBackend

# Outcomes within WINDOW_S seconds count towards the error share, if they are WINDOW_OUTCOMES or more.
WINDOW_S = 30.0
WINDOW_OUTCOMES = 10
MAX_OUTCOMES = 1000
PROBE_FAILURES = 2  # failed probes in a row that eject a worker
FORGIVE_S = 300.0  # time in service, seconds, after which one ejection no longer lengthens the next one
FIRST_WEIGHT = 0.1  # weight of a worker in the choice when it returns from an ejection


class WorkerState(StrEnum):
    """State of a worker."""

    NEW = "new"
    IN_SERVICE = "in_service"
    EJECTED = "ejected"


class WorkerHealth:
    """One worker's health, by the rules of its pool. ``now`` is any monotonic clock, the same in all calls.

    The length of an ejection doubles each time.
    """

    def __init__(self, rules: OpenAIBackend) -> None:
        self._rules = rules
        self.state = WorkerState.NEW
        self.ejections = 0
        self.strikes = 0
        self._failures = 0
        self._probe_failures = 0
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=MAX_OUTCOMES)
        self._since = 0.0
        self._until = 0.0
        # The worker asked for no requests of one of its models before this time.
        self.resting_until = 0.0
        self._returned_at: float | None = None

    @property
    def in_service(self) -> bool:
        return self.state is WorkerState.IN_SERVICE

    @property
    def first_probes_failed(self) -> bool:
        """Whether this worker was never in service and has just failed as many probes as would eject it."""
        return self.state is WorkerState.NEW and self._probe_failures == PROBE_FAILURES

    def weight(self, now: float) -> float:
        """The worker's share of the load relative to a worker in full service: 0 to 1."""
        if self.state is not WorkerState.IN_SERVICE:
            return 0.0
        if self._returned_at is None or self._rules.slow_start_seconds <= 0:
            return 1.0
        share = (now - self._returned_at) / self._rules.slow_start_seconds
        if share >= 1.0:
            self._returned_at = None
            return 1.0
        return max(FIRST_WEIGHT, share)

    def returns_in(self, now: float) -> float:
        """Seconds until an ejected worker is tried again; 0 for any other."""
        return max(0.0, self._until - now) if self.state is WorkerState.EJECTED else 0.0

    def succeeded(self, now: float) -> None:
        self._failures = 0
        self._outcomes.append((now, True))
        if self.strikes and self.in_service and now - self._since >= FORGIVE_S:
            self.strikes -= 1
            self._since = now

    def failed(self, now: float, *, last: bool = False) -> bool:
        """Record a request that failed at the worker; returns whether that ejects the worker.

        The ``last`` worker stays in service while its probes succeed: a request to it may still succeed.
        """
        self._failures += 1
        self._outcomes.append((now, False))
        if not self.in_service or (last and not self._probe_failures):
            return False
        if self._failures >= self._rules.eject_after_failures or self._share_is_high(now):
            self._eject(now)
            return True
        return False

    def refused(self, now: float) -> bool:
        """Eject the worker at once, since its server or engine is gone; returns whether it was in service."""
        if not self.in_service:
            return False
        self._eject(now)
        return True

    def probe_succeeded(self, now: float, *, alone: bool = False) -> bool:
        """Record a good probe; returns whether the worker enters service, if ``alone`` even while ejected."""
        self._probe_failures = 0
        if self.state is WorkerState.EJECTED and now < self._until and not alone:
            return False
        if self.in_service:
            return False
        if self.state is not WorkerState.NEW:
            self._returned_at = now
        self.state = WorkerState.IN_SERVICE
        self._since = now
        self._failures = 0
        self._outcomes.clear()
        return True

    def probe_failed(self, now: float) -> bool:
        """Record a failed probe; returns whether it ejects the worker. It renews an ejection that is over."""
        self._probe_failures += 1
        if self.state is WorkerState.EJECTED and now >= self._until:
            self._eject(now)
            return False
        if self.in_service and self._probe_failures >= PROBE_FAILURES:
            self._eject(now)
            return True
        return False

    def _share_is_high(self, now: float) -> bool:
        while self._outcomes and self._outcomes[0][0] < now - WINDOW_S:
            self._outcomes.popleft()
        if len(self._outcomes) < WINDOW_OUTCOMES:
            return False
        failures = sum(not good for _, good in self._outcomes)
        return failures >= self._rules.eject_error_share * len(self._outcomes)

    def _eject(self, now: float) -> None:
        doubled = self._rules.eject_seconds * 2.0 ** min(self.strikes, 30)
        self._until = now + min(doubled, self._rules.eject_max_seconds)
        self.strikes += 1
        self.ejections += self.in_service  # a failed probe only prolongs an ejection
        self.state = WorkerState.EJECTED
        self._returned_at = None
        self._outcomes.clear()
