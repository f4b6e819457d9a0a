"""How much load retries may add: a bucket of retries for each backend, sans I/O.

When a backend is in trouble every request fails, and a fixed number of retries each would give it several
times the load just then. So retries are paid for: first attempts bring a share of one each, and time brings a
few, so that a quiet gateway may retry too.
"""

from __future__ import annotations

# Retries that each first attempt pays for: at most a tenth of the load comes on top.
SHARE = 0.1
# Retries a second that need no first attempts. The failure with the most retries has three in 0.7 s: this
# pays for one such request every six seconds.
PER_SECOND = 0.5
# Most retries saved up: three such requests at once. It is what a start begins with.
MOST = 10.0


class RetryBudget:
    """The retries that each backend may still be given.

    Over any time, retries of one backend are at most ``most + share * first attempts + per_second *
    seconds``. Backends are configured, so their number is bounded.

    Args:
        share: retries that a first attempt pays for.
        per_second: retries that a second pays for.
        most: bound of what is saved up, at least 1.
    """

    def __init__(self, *, share: float = SHARE, per_second: float = PER_SECOND, most: float = MOST) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share}; allowed: 0 to 1")
        if not per_second >= 0:
            raise ValueError(f"per_second is {per_second}; allowed: 0 or more")
        if not most >= 1:
            raise ValueError(f"most is {most}; allowed: 1 or more")
        self._share = share
        self._per_second = per_second
        self._most = most
        self._buckets: dict[str, _Bucket] = {}

    def attempted(self, backend: str, now: float) -> None:
        """A first attempt is made."""
        bucket = self._buckets.get(backend)
        if bucket is None:
            self._buckets[backend] = _Bucket(self._most, now)
        else:
            bucket.retries = min(self._most, bucket.retries + self._share)

    def take(self, backend: str, now: float) -> bool:
        """Whether one retry may be made; it is paid for when it may."""
        if self.left(backend, now) < 1.0:
            return False
        self._buckets[backend].retries -= 1.0
        return True

    def left(self, backend: str, now: float) -> float:
        """Retries that may be made now."""
        bucket = self._buckets.get(backend)
        if bucket is None:
            bucket = self._buckets[backend] = _Bucket(self._most, now)
        earned = max(0.0, now - bucket.told_at) * self._per_second
        bucket.retries = min(self._most, bucket.retries + earned)
        bucket.told_at = max(bucket.told_at, now)
        return bucket.retries

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that have been asked."""
        return tuple(self._buckets)


class _Bucket:
    __slots__ = ("retries", "told_at")

    def __init__(self, retries: float, told_at: float) -> None:
        self.retries = retries
        self.told_at = told_at
