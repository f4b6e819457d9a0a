"""The circuit breaker of one backend: when many of its answers fail, it gets fewer requests or none."""

from collections import deque
from enum import StrEnum

WINDOW_S = 60.0
HALF_AT = 0.20
OPEN_AT = 0.50
HALF_SHARE = 0.10
OPEN_S = 30.0
MIN_SAMPLES = 10  # with fewer answers in the window, the error rate counts as 0
BUCKET_S = 1.0  # one bucket a second: memory does not depend on the load


class CircuitState(StrEnum):
    """Closed admits every request, half open one in ten, open none."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Circuit:
    """Counts the answers of the last minute and the failed ones; sans I/O.

    Above 20 % failures one request in ten is admitted, above 50 % none for 30 s; then the first one, and one
    in ten again, until the failures have left the window.
    """

    def __init__(self) -> None:
        self._buckets: deque[tuple[float, int, int]] = deque()  # start, ended, failed
        self._ended = 0
        self._failed = 0
        self._open_until = 0.0
        self._half_open_requests = 0

    def record(self, failed: bool, now: float) -> None:
        start = now - now % BUCKET_S
        if self._buckets and self._buckets[-1][0] == start:
            _, ended, bad = self._buckets[-1]
            self._buckets[-1] = (start, ended + 1, bad + failed)
        else:
            self._buckets.append((start, 1, int(failed)))
        self._ended += 1
        self._failed += failed
        if self._buckets[0][0] < now - WINDOW_S:
            self._forget(now)
        if failed and _rate(self._failed, self._ended) > OPEN_AT and now >= self._open_until:
            self._open_until = now + OPEN_S
            self._half_open_requests = 0  # the first request after the open state shows whether it may close

    def state(self, now: float) -> CircuitState:
        if now < self._open_until:
            return CircuitState.OPEN
        if not self._failed:
            return CircuitState.CLOSED
        self._forget(now)
        return CircuitState.HALF_OPEN if _rate(self._failed, self._ended) > HALF_AT else CircuitState.CLOSED

    def admits(self, now: float) -> bool:
        """Whether the next request may pass; in the half-open state every tenth request."""
        if not self._failed and now >= self._open_until:
            return True
        state = self.state(now)
        if state is CircuitState.HALF_OPEN:
            self._half_open_requests += 1
            return self._half_open_requests % round(1 / HALF_SHARE) == 1
        return state is CircuitState.CLOSED

    def retry_after_s(self, now: float) -> float:
        """Seconds until the breaker half opens; if it is half open, until it closes if no answer follows."""
        wait_s = self._open_until - now
        ended, failed = self._ended, self._failed
        for start, answers, bad in self._buckets if wait_s <= 0.0 else ():
            if _rate(failed, ended) <= HALF_AT:
                break
            ended, failed = ended - answers, failed - bad
            wait_s = start + WINDOW_S - now
        return max(0.0, wait_s)

    def error_rate(self, now: float) -> float:
        """Share of the last minute's answers that failed; 0 with fewer than ``MIN_SAMPLES`` answers."""
        self._forget(now)
        return _rate(self._failed, self._ended)

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] < now - WINDOW_S:
            _, ended, failed = self._buckets.popleft()
            self._ended -= ended
            self._failed -= failed


def _rate(failed: int, ended: int) -> float:
    return failed / ended if ended >= MIN_SAMPLES else 0.0
