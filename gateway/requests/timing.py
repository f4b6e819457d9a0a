"""The time of one request: the duration of each stage, and the time limit of all stages."""

from collections.abc import Callable
from types import TracebackType

from gateway.errors import DeadlineExceeded
from resilience.time_limits import TimeLimit


class StageTimer:
    """Measures the stages of one request; ``stage_ms`` has the milliseconds of each stage, in order.

    As a context manager it applies the request's time limit, and raises DeadlineExceeded when it expires.
    """

    __slots__ = ("_arrived_at", "_clock", "_last", "_limit", "stage_ms")

    def __init__(self, clock: Callable[[], float], arrived_at: float, limit: TimeLimit) -> None:
        self._clock = clock
        self._arrived_at = self._last = arrived_at
        self._limit = limit
        self.stage_ms: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Record the end of a stage."""
        now = self._clock()
        self.stage_ms[stage] = (now - self._last) * 1000
        self._last = now

    def total_ms(self) -> float:
        """Return the milliseconds since arrival."""
        return (self._clock() - self._arrived_at) * 1000

    def at_ms(self, at: float | None) -> float | None:
        """Convert a time of the clock to milliseconds after arrival."""
        return None if at is None else (at - self._arrived_at) * 1000

    @property
    def timed_out(self) -> bool:
        """Whether the request was, or is being, cancelled because it took too long."""
        return self._limit.expired

    def __enter__(self) -> None:
        self._limit.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._limit.__exit__(kind, error, trace)
        except TimeoutError:
            raise DeadlineExceeded(f"the request took longer than {self._limit.after_s:g} s") from None
