"""Bounds on repeated calls, sans I/O.

:class:`RetryBudget` bounds the load that retries add to one backend: when every request fails, a fixed number
of retries per request would multiply the load. :class:`CallBudget` bounds the calls of one request, which its
nested loops (fallback chain, retry loop, workers of a pool) would multiply.
"""

from dataclasses import dataclass

from msgspec import Struct

SHARE = 0.1  # retries that each first attempt earns: retries add at most a tenth of the load
# Retries per second that need no first attempt: enough for one request every six seconds with three retries,
# which is the most that the failure policies permit (in 0.7 s).
PER_SECOND = 0.5
# Most retries saved up, enough for three such requests at once. A bucket begins with this many.
MOST = 10.0

# The failure policies permit at most three retries on a backend, and an answer is resumed at most four times.
MAX_EXTRA_CALLS = 4


class CallBudget(Struct):
    """The calls to servers that one request may still make.

    The first call to each backend is free. Each further call to any server takes one of ``extra``: a retry, a
    resumption, another worker of a pool, a hedged request. ``broke``: the servers that broke off the answer.
    """

    extra: int = MAX_EXTRA_CALLS
    called: set[str] = set()
    broke: tuple[str, ...] = ()

    def allows(self, backend: str) -> bool:
        return backend not in self.called or self.extra > 0

    def take(self, backend: str) -> bool:
        """Take a call to ``backend``; returns false when none is left."""
        if backend in self.called:
            return self.take_extra()
        self.called.add(backend)
        return True

    def take_extra(self) -> bool:
        """Take a further call, e.g. to another worker of the backend; returns false when none is left."""
        if self.extra <= 0:
            return False
        self.extra -= 1
        return True


class RetryBudget:
    """A token bucket of retries for each backend.

    Retries of one backend are at most ``most + share * first attempts + per_second * seconds``.
    """

    def __init__(self, *, share: float = SHARE, per_second: float = PER_SECOND, most: float = MOST) -> None:
        self._share = share
        self._per_second = per_second
        self._most = most
        self._buckets: dict[str, _Bucket] = {}

    def attempted(self, backend: str, now: float) -> None:
        """Record a first attempt, which earns a part of a retry."""
        bucket = self._buckets.get(backend)
        if bucket is None:
            self._buckets[backend] = _Bucket(self._most, now)
        else:
            bucket.retries = more if (more := bucket.retries + self._share) < self._most else self._most

    def take(self, backend: str, now: float) -> bool:
        """Take one retry; returns false when none is left."""
        if self.remaining(backend, now) < 1.0:
            return False
        self._buckets[backend].retries -= 1.0
        return True

    def remaining(self, backend: str, now: float) -> float:
        bucket = self._buckets.setdefault(backend, _Bucket(self._most, now))
        earned = max(0.0, now - bucket.updated_at) * self._per_second
        bucket.retries = min(self._most, bucket.retries + earned)
        bucket.updated_at = max(bucket.updated_at, now)
        return bucket.retries

    def left(self, now: float) -> dict[str, float]:
        """Return what remains for each backend that has had a call."""
        return {backend: self.remaining(backend, now) for backend in self._buckets}


@dataclass(slots=True)
class _Bucket:
    retries: float
    updated_at: float
