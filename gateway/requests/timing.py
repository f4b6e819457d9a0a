"""The time of one request: the duration of each stage, and the time limit of all stages."""

from collections.abc import Callable

from msgspec import Struct

from gateway.errors import DeadlineExceeded
from resilience.time_limits import TimeLimit


class StageTimer(Struct, eq=False):
    """Measures the stages of one request.

    ``ended_at`` has the time at which each stage ended, in order; ``limit`` is the limit of all stages.
    """

    clock: Callable[[], float]
    arrived_at: float
    limit: TimeLimit
    ended_at: dict[str, float] = {}

    def stage_ms(self) -> dict[str, float]:
        stage_ms, began_at = {}, self.arrived_at
        for stage, ended_at in self.ended_at.items():
            stage_ms[stage] = (ended_at - began_at) * 1000
            began_at = ended_at
        return stage_ms

    def total_ms(self) -> float:
        """The time from the request's arrival until now, or until its answer was sent."""
        sent_at = self.ended_at.get("respond")
        return ((self.clock() if sent_at is None else sent_at) - self.arrived_at) * 1000

    def at_ms(self, at: float | None) -> float | None:
        """Convert a time of the clock to milliseconds after arrival."""
        return None if at is None else (at - self.arrived_at) * 1000

    def cause_of(self, error: Exception) -> Exception:
        """Return DeadlineExceeded for the TimeoutError of the limit, any other error as it is."""
        if self.limit.expired and isinstance(error, TimeoutError):
            return DeadlineExceeded(f"the request took longer than {self.limit.after_s:g} s")
        return error
