from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from observability.attributes import attributes
from observability.events import RequestRecord
from observability.labels import MAX_VALUES
from observability.metrics import Metrics
from observability.requestlog import request_line

Make = Callable[..., RequestRecord]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1.2.3", known_prompt_versions=["chat-manga-2.1"])


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


def ratio(metrics: Metrics, against: str) -> float | None:
    return value(metrics, "sluice_prompt_cached_ratio", prompt_version="chat-manga-2.1", against=against)


def prefix(tokens: int, expected: int, cached: int) -> dict[str, int]:
    return {"prefix_tokens": tokens, "prefix_expected_tokens": expected, "prefix_cached_tokens": cached}


def test_prefix_expected_and_cached_tokens_are_counted_by_prompt_version(
    metrics: Metrics, record: Make
) -> None:
    metrics.request(record(**prefix(400, 0, 0)))
    metrics.request(record(**prefix(400, 400, 384)))
    labels = {"prompt_version": "chat-manga-2.1"}
    assert value(metrics, "sluice_prompt_prefix_tokens_total", **labels) == 800
    assert value(metrics, "sluice_prompt_expected_cached_tokens_total", **labels) == 400
    assert value(metrics, "sluice_prompt_cached_tokens_total", **labels) == 384


def test_an_engine_that_loses_what_it_had_shows_against_expected(metrics: Metrics, record: Make) -> None:
    for _ in range(1_000):
        metrics.request(record(**prefix(400, 400, 400)))
    assert ratio(metrics, "expected") == ratio(metrics, "prefix") == pytest.approx(1.0)
    for _ in range(300):
        metrics.request(record(**prefix(400, 400, 0)))
    assert ratio(metrics, "expected") == ratio(metrics, "prefix") == pytest.approx(0.125, abs=0.01)


def test_a_prompt_that_changes_with_each_request_shows_against_the_prefix_alone(
    metrics: Metrics, record: Make
) -> None:
    for _ in range(1_000):
        metrics.request(record(**prefix(400, 400, 400)))
    for _ in range(300):
        metrics.request(record(**prefix(400, 16, 16)))
    assert ratio(metrics, "expected") == pytest.approx(1.0)
    assert ratio(metrics, "prefix") == pytest.approx(0.125 + 0.875 * 0.04, abs=0.01)


def test_finding_more_than_was_expected_does_not_make_up_for_what_is_lost(
    metrics: Metrics, record: Make
) -> None:
    metrics.request(record(**prefix(400, 16, 400)))
    assert ratio(metrics, "expected") == 1.0


def test_requests_without_a_prefix_or_answered_elsewhere_count_for_nothing(
    metrics: Metrics, record: Make
) -> None:
    metrics.request(record())
    metrics.request(record(**prefix(0, 0, 0)))
    assert value(metrics, "sluice_prompt_prefix_tokens_total", prompt_version="chat-manga-2.1") is None
    assert ratio(metrics, "prefix") is None


def test_volatile_kinds_are_counted_with_what_was_done(metrics: Metrics, record: Make) -> None:
    metrics.request(record(volatile=("date", "id"), volatile_action="moved"))
    metrics.request(record(volatile=("date",), volatile_action="reported"))
    assert value(metrics, "sluice_prompt_volatile_total", kind="date", action="moved") == 1
    assert value(metrics, "sluice_prompt_volatile_total", kind="date", action="reported") == 1
    assert value(metrics, "sluice_prompt_volatile_total", kind="id", action="moved") == 1


def test_more_versions_than_a_label_may_have_are_one_series(metrics: Metrics, record: Make) -> None:
    for number in range(3 * MAX_VALUES):
        metrics.request(record(prompt_version=f"v{number}", **prefix(16, 16, 16)))
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    for name, bound in (("sluice_prompt_cached_tokens", 1), ("sluice_prompt_cached_ratio", 2)):
        assert len(families[name].samples) <= bound * MAX_VALUES


def test_trace_and_log_carry_the_fingerprint_and_leave_out_what_is_not_known(record: Make) -> None:
    marked = record(prefix_fingerprint="00ff00ff00ff00ff", volatile=("date",), volatile_action="moved")
    assert attributes(marked)["sluice.prefix.fingerprint"] == "00ff00ff00ff00ff"
    assert attributes(marked)["sluice.prompt.volatile"] == ("date",)
    assert request_line(marked)["prefix_fingerprint"] == "00ff00ff00ff00ff"
    assert not [
        name
        for name, value in attributes(record()).items()
        if ("fingerprint" in name or "volatile" in name) and value is not None
    ]
    assert not [name for name in request_line(record()) if "fingerprint" in name or "volatile" in name]
