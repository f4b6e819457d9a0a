"""How long a request would wait for a place in the batch, learned from how long answers take."""

from __future__ import annotations

# Weight of a new sample once some ten have been seen: a change of regime is followed within about twenty
# answers, one odd answer moves the mean by a tenth of its distance.
SMOOTHING = 0.1

# Bounds of "try again": below, clients would hammer; above, they would stay away long after the load is gone.
MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0


class ServiceTime:
    """Mean time that a backend takes for one answer, seconds.

    A plain mean of the first samples, then an exponentially weighted one, so that the first answer after
    a start is not a tenth of the truth.
    """

    __slots__ = ("_mean_s", "_samples")

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._samples = 0

    @property
    def mean_s(self) -> float:
        """The mean, seconds; 0 before the first sample: nothing is known, so nothing is claimed."""
        return self._mean_s

    def learn(self, service_s: float) -> None:
        """Take one answer's service time, seconds; a negative one counts as 0."""
        self._samples += 1
        weight = max(1.0 / self._samples, SMOOTHING)
        self._mean_s += weight * (max(0.0, service_s) - self._mean_s)


def turnover_s(mean_service_s: float, capacity: int) -> float:
    """Time until one of ``capacity`` places becomes free, seconds; 0 when the capacity is unknown (0)."""
    return mean_service_s / capacity if capacity > 0 else 0.0


def estimate_wait_s(ahead: int, mean_service_s: float, capacity: int) -> float:
    """Wait of a request with ``ahead`` others before it in the queue, seconds.

    Each of them needs one turnover. Without a known capacity or a measured service time the wait cannot be
    told and counts as 0: then only the bound on the queue protects the backend.
    """
    return max(0, ahead) * turnover_s(mean_service_s, capacity)


def retry_after_s(wait_s: float, one_turnover_s: float) -> float:
    """When trying again makes sense: after the wait, at least after one turnover; bounded, seconds."""
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s, one_turnover_s))
