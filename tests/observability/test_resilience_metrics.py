"""Failures and the reactions to them, as metrics and log lines."""

from __future__ import annotations

import pytest

from observability.collectors import plain
from observability.metrics import Metrics
from observability.subscribers import EventDispatcher
from resilience.degenerate import Sign
from resilience.events import AttemptFailed, Degenerated, LoadScaled, Recovered, RetryRefused
from resilience.failures import FailureKind
from tests.observability.test_subscribers import Lines, count


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1", known_backends=["local"])


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def hub(metrics: Metrics, lines: Lines) -> EventDispatcher:
    return EventDispatcher().record(metrics, log=lines)


def test_out_of_memory_is_counted_by_the_layer_that_met_it(
    hub: EventDispatcher, metrics: Metrics, lines: Lines
) -> None:
    hub.emit(LoadScaled("local", 0.7, shrunk=True))
    hub.emit(Recovered("local", FailureKind.CUDA_OOM))
    hub.emit(Recovered("local", FailureKind.TIMEOUT))
    name = "sluice_oom_contained_total"
    assert count(metrics, name, backend="local", layer="recovery") == 1
    assert count(metrics, name, backend="local", layer="containment") == 1
    assert count(metrics, "sluice_admitted_load_factor", backend="local") == 0.7
    hub.emit(LoadScaled("local", 0.75, shrunk=False))
    assert count(metrics, name, backend="local", layer="recovery") == 1
    assert count(metrics, "sluice_admitted_load_factor", backend="local") == 0.75
    assert count(metrics, "sluice_recovered_total", backend="local", kind="timeout") == 1
    assert [words for _, words, _ in lines.lines] == ["load scaled", "load scaled"]


def test_what_is_left_of_the_retry_budget_is_read_when_scraped(
    hub: EventDispatcher, metrics: Metrics
) -> None:
    left = {"local": 7.5}
    metrics.registry.register(plain("sluice_retry_budget", lambda: left))
    hub.emit(RetryRefused("local", FailureKind.TIMEOUT))
    assert count(metrics, "sluice_retry_budget", backend="local") == 7.5
    left["local"] = 0.25
    assert count(metrics, "sluice_retry_budget", backend="local") == 0.25
    assert count(metrics, "sluice_retries_refused_total", backend="local") == 1


def test_an_answer_that_became_nonsense_is_counted_and_logged(
    hub: EventDispatcher, metrics: Metrics, lines: Lines
) -> None:
    hub.emit(Degenerated("local", Sign.REPETITION, "end", 176))
    labels = {"backend": "local", "sign": "repetition", "action": "end"}
    assert count(metrics, "sluice_degenerate_answers_total", **labels) == 1
    assert lines.lines == [
        ("warning", "degenerate answer", {**labels, "tokens": 176}),
    ]


def test_a_caller_who_leaves_is_counted_and_not_logged_as_a_failure(
    hub: EventDispatcher, metrics: Metrics, lines: Lines
) -> None:
    hub.emit(AttemptFailed("local", FailureKind.CANCELLED_BY_CLIENT, 1, True, "CancelledError"))
    failures = "sluice_backend_failures_total"
    assert count(metrics, failures, backend="local", kind="cancelled_by_client") == 1
    assert lines.lines == []


def test_credentials_that_are_refused_are_an_error_line(hub: EventDispatcher, lines: Lines) -> None:
    hub.emit(AttemptFailed("bedrock", FailureKind.ACCESS_DENIED, 1, False, "ClientError"))
    [(level, words, values)] = lines.lines
    assert (level, words, values["kind"]) == ("error", "attempt failed", "access_denied")
