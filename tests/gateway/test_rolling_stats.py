"""The rolling statistics of the last minute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.health.rolling_stats import MAX_SAMPLES, MIN_SAMPLES, WINDOW_S, RollingStats
from observability.events import RequestRecord


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(**changes: object) -> RequestRecord:
    base = RequestRecord("r", "g", "0" * 32, "t", "native", 200, 100.0, ttft_ms=10.0, output_tokens=10)
    return replace(base, **changes)


def test_the_error_rate_is_0_for_a_few_requests_and_the_share_of_errors_for_many() -> None:
    stats = RollingStats(Clock())
    stats.observe(record(status=500, error_code="internal"))
    assert stats.error_rate() == 0.0
    for _ in range(MIN_SAMPLES):
        stats.observe(record(status=503, error_code="backend_unavailable"))
    assert stats.error_rate() == 1.0


def test_the_gateway_fails_only_if_every_route_fails() -> None:
    clock = Clock()
    stats = RollingStats(clock)
    dead = record(status=503, error_code="backend_unavailable", route="dead")
    for _ in range(50):
        stats.observe(dead)
    assert stats.failing(0.5)
    stats.observe(record(status=422, error_code="invalid_request", route="other"))
    assert stats.failing(0.5), "a caller's mistake does not show that the route works"
    stats.observe(record(route="other"))
    assert stats.error_rate() > 0.9 and not stats.failing(0.5)
    for _ in range(2):
        stats.observe(record(status=500, error_code="internal", route="other"))
    assert stats.failing(0.5)
    clock.now = WINDOW_S + 1
    assert not stats.failing(0.5)


def degraded(reason: str) -> RequestRecord:
    return record(
        fallback_kind="degraded_response", fallback_reason=reason, finish_reason="degraded", ttft_ms=None
    )


def test_a_callers_own_mistake_is_no_error_of_the_gateway() -> None:
    stats = RollingStats(Clock())
    for _ in range(10):
        stats.observe(record(status=422, error_code="invalid_request"))
        stats.observe(record(status=499, error_code="cancelled"))
        stats.observe(record(status=504, error_code="deadline_exceeded"))
    assert stats.error_rate() == 0.0


def test_a_fallback_that_answered_is_no_error_and_is_told_apart() -> None:
    stats = RollingStats(Clock())
    for _ in range(10):
        stats.observe(record(fallback_kind="bedrock", fallback_reason="engine_dead", finish_reason="stop"))
        stats.observe(
            record(fallback_kind="response_cache", fallback_reason="cuda_oom", finish_reason="stop")
        )
    assert stats.error_rate() == 0.0
    assert stats.figures()["fallbacks_last_minute"] == 20


@pytest.mark.parametrize("reason", ["queue_full", "wait_exceeded", "memory_pressure", "low_priority_shed"])
def test_an_overload_does_not_take_the_gateway_out_of_service(reason: str) -> None:
    stats = RollingStats(Clock())
    for _ in range(10):
        stats.observe(degraded(reason))
        stats.observe(record(status=503, error_code=reason))
    assert stats.error_rate() == 0.0
    assert stats.figures()["shed_last_minute"] == 20


@pytest.mark.parametrize("reason", ["engine_dead", "circuit_open", "nan_output", "backend_unavailable"])
def test_degraded_text_because_the_backend_fails_is_an_error(reason: str) -> None:
    stats = RollingStats(Clock())
    for _ in range(10):
        stats.observe(degraded(reason))
    assert stats.error_rate() == 1.0
    assert stats.figures()["errors_last_minute"] == 10


@pytest.mark.parametrize("reason", ["degenerate_output", "invalid_input"])
def test_a_caller_cannot_take_the_gateway_out_of_service_by_what_it_asks_for(reason: str) -> None:
    stats = RollingStats(Clock())
    for _ in range(100):
        stats.observe(degraded(reason))
    assert stats.error_rate() == 0.0


def test_lines_of_batches_neither_raise_nor_lower_the_error_rate() -> None:
    """They are in the figures."""
    stats = RollingStats(Clock())
    lost = {"status": 503, "error_code": "backend_unavailable"}
    for _ in range(100):
        stats.observe(record(batch_line=True, **lost))
    assert stats.error_rate() == 0.0
    for number in range(20):
        stats.observe(record(**(lost if number % 2 else {})))
        stats.observe(record(batch_line=True))
    assert stats.error_rate() == 0.5
    assert (stats.figures()["requests_last_minute"], stats.figures()["errors_last_minute"]) == (140, 110)


def test_what_is_older_than_a_minute_counts_no_more() -> None:
    clock = Clock()
    stats = RollingStats(clock)
    for _ in range(20):
        stats.observe(record(status=500, error_code="internal"))
    clock.now = 61.0
    assert stats.error_rate() == 0.0
    assert stats.figures()["requests_last_minute"] == 0


def test_failures_of_a_dead_engine_do_not_count_against_the_next_one() -> None:
    clock = Clock()
    stats = RollingStats(clock)
    for _ in range(20):
        stats.observe(record(status=500, error_code="internal"))
    clock.now = 5.0
    stats.engine_restarted()
    assert stats.error_rate() == 0.0
    assert stats.figures()["errors_last_minute"] == 20, "they are told all the same"
    for _ in range(10):
        stats.observe(record(status=500, error_code="internal"))
    assert stats.error_rate() == 1.0


def test_preemptions_are_counted_from_the_engines_total() -> None:
    clock = Clock()
    stats = RollingStats(clock)
    stats.observe_preemptions(5)
    clock.now = 100.0
    stats.observe_preemptions(7)
    stats.observe_preemptions(9)
    assert stats.figures()["preemptions_last_minute"] == 4


def test_percentiles_come_from_the_requests_that_had_tokens() -> None:
    stats = RollingStats(Clock())
    for i in range(100):
        stats.observe(record(ttft_ms=float(i)))
    stats.observe(record(ttft_ms=None))
    figures = stats.figures()
    assert (figures["ttft_ms_p50"], figures["ttft_ms_p99"]) == (50.0, 99.0)
    assert figures["ttft_ms_avg"] == 49.5


def test_the_rate_of_requests_is_over_the_time_that_was_seen() -> None:
    clock = Clock()
    stats = RollingStats(clock)
    clock.now = 10.0
    for _ in range(20):
        stats.observe(record())
    assert stats.figures()["requests_per_second"] == 2.0
    clock.now = 69.0
    assert stats.figures()["requests_per_second"] == pytest.approx(20 / 60, abs=0.001)


@given(
    st.lists(
        st.one_of(st.sampled_from(["ok", "failed", "restart"]), st.floats(0.0, WINDOW_S / 2)), max_size=80
    )
)
def test_the_rate_is_that_of_the_samples_within_a_minute_and_since_the_restart(
    events: list[str | float],
) -> None:
    clock = Clock()
    stats = RollingStats(clock)
    seen: list[tuple[float, bool]] = []
    anew_at = float("-inf")
    for event in events:
        if isinstance(event, float):
            clock.now += event
        elif event == "restart":
            stats.engine_restarted()
            anew_at = clock.now
        else:
            failed = event == "failed"
            stats.observe(record(status=503, error_code="backend_unavailable") if failed else record())
            seen.append((clock.now, failed))
        counted = [failed for at, failed in seen if at >= max(clock.now - WINDOW_S, anew_at)]
        expected = sum(counted) / len(counted) if len(counted) >= MIN_SAMPLES else 0.0
        assert stats.error_rate() == expected
        assert stats.figures()["requests_last_minute"] == sum(at >= clock.now - WINDOW_S for at, _ in seen)


def test_of_more_samples_than_there_is_room_for_the_newest_count() -> None:
    stats = RollingStats(Clock())
    for _ in range(MAX_SAMPLES):
        stats.observe(record(status=503, error_code="backend_unavailable"))
    for _ in range(MAX_SAMPLES // 2):
        stats.observe(record())
    assert stats.figures()["requests_last_minute"] == MAX_SAMPLES
    assert stats.error_rate() == 0.5
