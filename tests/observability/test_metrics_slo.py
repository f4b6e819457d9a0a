"""Which requests meet a route's targets, and which do not count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from observability.events import RequestRecord
from observability.metrics import Metrics
from observability.slo_metrics import SloTargets, targets_met

Make = Callable[..., RequestRecord]
TARGETS = SloTargets(ttft_ms=200, total_ms=1400)
ROUTE = "self_hosted_generation"


def test_an_answer_meets_each_target_by_its_own_time(record: Make) -> None:
    assert targets_met(record(ttft_ms=200.0, total_ms=1400.0), TARGETS) == (True, True), (
        "on the target is in time"
    )
    assert targets_met(record(ttft_ms=200.1, total_ms=1400.0), TARGETS) == (False, True)
    assert targets_met(record(ttft_ms=88.0, total_ms=1400.1), TARGETS) == (True, False)


def test_an_answer_that_came_whole_has_its_first_token_with_its_last(record: Make) -> None:
    cached = record(
        ttft_ms=None, total_ms=201.0, fallback_kind="response_cache", fallback_reason="queue_full"
    )
    assert targets_met(cached, TARGETS) == (False, True)


@pytest.mark.parametrize(
    "status, code", [(429, "rate_limited"), (422, "invalid_request"), (404, "unknown_model")]
)
def test_a_callers_own_fault_counts_for_no_target(record: Make, status: int, code: str) -> None:
    assert targets_met(record(status=status, error_code=code, ttft_ms=None), TARGETS) == (None, None)


@pytest.mark.parametrize("status", [200, 499, 503])
def test_a_batchs_line_counts_for_no_target(record: Make, status: int) -> None:
    line = record(status=status, ttft_ms=9_000.0, total_ms=60_000.0, batch_line=True)
    assert targets_met(line, TARGETS) == (None, None)


def test_a_failure_of_the_gateway_misses_both_targets_however_fast(record: Make) -> None:
    assert targets_met(record(status=503, error_code="queue_full", ttft_ms=None, total_ms=1.0), TARGETS) == (
        False,
        False,
    )


def test_the_degraded_text_is_no_answer(record: Make) -> None:
    degraded = record(
        fallback_kind="degraded_response", fallback_reason="queue_full", finish_reason="degraded",
        ttft_ms=None, total_ms=2.0,
    )  # fmt: skip
    assert targets_met(degraded, TARGETS) == (False, False)


def test_a_stream_that_broke_off_had_its_first_token(record: Make) -> None:
    assert targets_met(record(error_code="stream_broken", total_ms=300.0), TARGETS) == (True, False)


def test_a_caller_that_left_counts_only_for_targets_already_met_or_missed(record: Make) -> None:
    def left(total_ms: float, ttft_ms: float | None = None) -> tuple[bool | None, bool | None]:
        return targets_met(
            record(status=499, error_code="cancelled", total_ms=total_ms, ttft_ms=ttft_ms), TARGETS
        )

    assert left(150.0) == (None, None)
    assert left(900.0) == (False, None)
    assert left(900.0, ttft_ms=90.0) == (True, None)
    assert left(1500.0, ttft_ms=90.0) == (True, False)


def scraped(metrics: Metrics) -> dict[tuple[str, str, str], float]:
    return {
        (sample.name, sample.labels["route"], sample.labels["objective"]): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name.startswith("sluice_slo_")
    }


def test_a_request_is_counted_against_the_targets_of_its_revision(record: Make) -> None:
    metrics = Metrics(version="1", known_routes=[ROUTE])
    targets = {ROUTE: TARGETS}
    metrics.slo.targets = lambda: targets
    metrics.request(record(ttft_ms=300.0, total_ms=900.0))
    targets = {ROUTE: SloTargets(ttft_ms=500, total_ms=800)}
    metrics.request(record(ttft_ms=300.0, total_ms=900.0, revision=8))
    assert scraped(metrics) == {
        ("sluice_slo_requests_total", ROUTE, "ttft"): 2.0,
        ("sluice_slo_requests_total", ROUTE, "total"): 2.0,
        ("sluice_slo_good_total", ROUTE, "ttft"): 1.0,
        ("sluice_slo_good_total", ROUTE, "total"): 1.0,
        ("sluice_slo_target_seconds", ROUTE, "ttft"): 0.5,
        ("sluice_slo_target_seconds", ROUTE, "total"): 0.8,
    }


def test_a_route_without_a_request_is_there_with_zeros(record: Make) -> None:
    metrics = Metrics(version="1", known_routes=[ROUTE])
    metrics.slo.targets = lambda: {ROUTE: TARGETS}
    assert scraped(metrics)["sluice_slo_good_total", ROUTE, "ttft"] == 0.0


def test_requests_without_a_known_route_count_for_no_target(record: Make) -> None:
    metrics = Metrics(version="1", known_routes=[ROUTE])
    metrics.slo.targets = lambda: {ROUTE: TARGETS}
    metrics.request(record(route=None, status=503, error_code="draining"))
    metrics.request(record(route="another"))
    assert {
        value for (name, _, _), value in scraped(metrics).items() if name != "sluice_slo_target_seconds"
    } == {0.0}
