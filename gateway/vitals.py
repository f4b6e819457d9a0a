"""Rolling figures of the last minute, for readiness and deep health."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from observability.events import RequestRecord

WINDOW_S = 60.0
# Enough for a minute at 170 requests a second; older ones leave first.
MAX_SAMPLES = 10_000
# Below this many requests a rate says nothing.
MIN_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished request, as far as health is concerned; milliseconds."""

    at: float
    failed: bool
    ttft_ms: float | None
    tpot_ms: float | None


class Vitals:
    """Counts the last minute's requests; bounded in memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._preemptions: deque[tuple[float, int]] = deque(maxlen=MAX_SAMPLES)
        self._anew_at = float("-inf")

    def saw(self, record: RequestRecord) -> None:
        """A request has ended."""
        failed = record.failed or record.fallback_kind is not None
        self._samples.append(Sample(self._clock(), failed, record.ttft_ms, record.time_per_output_token_ms))

    def saw_preemptions(self, total: int) -> None:
        """The engine's counter of preemptions, since its start."""
        if not self._preemptions or self._preemptions[-1][1] != total:
            self._preemptions.append((self._clock(), total))

    def engine_restarted(self) -> None:
        """What failed with the engine before says nothing of the one that takes work now."""
        self._anew_at = self._clock()

    def error_rate(self) -> float:
        """Share of the last minute's requests that no backend answered; 0 below a few samples.

        Since the engine's last restart, so that readiness does not wait a minute for its return.
        """
        recent = [sample for sample in self._recent() if sample.at >= self._anew_at]
        if len(recent) < MIN_SAMPLES:
            return 0.0
        return sum(sample.failed for sample in recent) / len(recent)

    def figures(self) -> dict[str, object]:
        """The figures of deep health."""
        recent = self._recent()
        since = self._clock() - WINDOW_S
        totals = [total for at, total in self._preemptions if at >= since]
        before = [total for at, total in self._preemptions if at < since]
        start = before[-1] if before else 0
        return {
            "requests_last_minute": len(recent),
            "errors_last_minute": sum(sample.failed for sample in recent),
            "preemptions_last_minute": max(0, totals[-1] - start) if totals else 0,
            **_percentiles("ttft_ms", [s.ttft_ms for s in recent if s.ttft_ms is not None]),
            **_percentiles("tpot_ms", [s.tpot_ms for s in recent if s.tpot_ms is not None]),
        }

    def _recent(self) -> list[Sample]:
        since = self._clock() - WINDOW_S
        return [sample for sample in self._samples if sample.at >= since]


def _percentiles(name: str, values: Sequence[float]) -> dict[str, object]:
    ordered = sorted(values)
    if not ordered:
        return {f"{name}_p50": None, f"{name}_p99": None}
    return {
        f"{name}_p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 3) for p in (50, 99)
    }
