"""The last minute's figures."""

from __future__ import annotations

from gateway.vitals import MIN_SAMPLES, Vitals
from observability.events import RequestRecord


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(**changes: object) -> RequestRecord:
    base = RequestRecord("r", "g", "0" * 32, "t", "native", 200, 100.0, ttft_ms=10.0, output_tokens=10)
    from dataclasses import replace

    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_few_failures_say_nothing_many_say_their_share() -> None:
    vitals = Vitals(Clock())
    vitals.saw(record(status=500, error_code="internal"))
    assert vitals.error_rate() == 0.0
    for _ in range(MIN_SAMPLES):
        vitals.saw(record(status=503, error_code="backend_unavailable"))
    assert vitals.error_rate() == 1.0


def test_a_callers_own_mistake_is_no_error_of_the_house_a_fallback_is() -> None:
    vitals = Vitals(Clock())
    for _ in range(10):
        vitals.saw(record(status=422, error_code="invalid_request"))
        vitals.saw(record(fallback_kind="degraded_response", fallback_reason="engine_dead"))
    assert vitals.error_rate() == 0.5


def test_what_is_older_than_a_minute_counts_no_more() -> None:
    clock = Clock()
    vitals = Vitals(clock)
    for _ in range(20):
        vitals.saw(record(status=500, error_code="internal"))
    clock.now = 61.0
    assert vitals.error_rate() == 0.0
    assert vitals.figures()["requests_last_minute"] == 0


def test_what_failed_with_a_dead_engine_says_nothing_of_the_next_one() -> None:
    clock = Clock()
    vitals = Vitals(clock)
    for _ in range(20):
        vitals.saw(record(status=500, error_code="internal"))
    clock.now = 5.0
    vitals.engine_restarted()
    assert vitals.error_rate() == 0.0
    assert vitals.figures()["errors_last_minute"] == 20, "they are told all the same"
    for _ in range(10):
        vitals.saw(record(status=500, error_code="internal"))
    assert vitals.error_rate() == 1.0


def test_preemptions_are_counted_from_the_engines_total() -> None:
    clock = Clock()
    vitals = Vitals(clock)
    vitals.saw_preemptions(5)
    clock.now = 100.0
    vitals.saw_preemptions(7)
    vitals.saw_preemptions(9)
    assert vitals.figures()["preemptions_last_minute"] == 4


def test_percentiles_come_from_the_requests_that_had_tokens() -> None:
    vitals = Vitals(Clock())
    for i in range(100):
        vitals.saw(record(ttft_ms=float(i)))
    vitals.saw(record(ttft_ms=None))
    figures = vitals.figures()
    assert (figures["ttft_ms_p50"], figures["ttft_ms_p99"]) == (50.0, 99.0)
