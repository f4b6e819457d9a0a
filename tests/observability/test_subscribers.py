from collections.abc import Callable, Mapping
from typing import Any

import pytest

from accounting.events import DatabaseIsBack, JournalIsBack, LossReason, RowsLost, RowsWritten, WriteFailed
from admission.events import Admitted, RefusedEvent
from admission.values import Reason
from observability.events import RequestRecord
from observability.metrics import Metrics
from observability.slo_metrics import SloTargets
from observability.subscribers import EventDispatcher
from resilience.events import AttemptFailed, Retried
from resilience.failures import FailureKind

Make = Callable[..., RequestRecord]


class Lines:
    """A logger that stores its lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def info(self, event: str, **values: Any) -> None:
        self.lines.append(("info", event, values))

    def warning(self, event: str, **values: Any) -> None:
        self.lines.append(("warning", event, values))

    def error(self, event: str, **values: Any) -> None:
        self.lines.append(("error", event, values))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1")


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def requests() -> list[RequestRecord]:
    return []


@pytest.fixture
def hub(metrics: Metrics, lines: Lines, requests: list[RequestRecord]) -> EventDispatcher:
    return EventDispatcher().record(metrics, log=lines, log_request=requests.append)


def count(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_finished_request_is_counted_and_logged_once(
    hub: EventDispatcher, metrics: Metrics, requests: list[RequestRecord], record: Make
) -> None:
    hub.emit(record())
    assert count(metrics, "sluice_tokens_total", kind="input") == 842
    assert requests == [record()]


def test_admissions_decisions_are_counted_by_reason(hub: EventDispatcher, metrics: Metrics) -> None:
    hub.emit(Admitted("local", "shop", 0, 0.1, 0, 0.2, 1))
    hub.emit(RefusedEvent("local", "shop", 0, Reason.MEMORY_PRESSURE, 0.1, 1.0, 4, 0.95, 9))
    name = "sluice_admission_decisions_total"
    normal = {"class": "normal"}
    assert count(metrics, name, decision="admitted", reason="none", **normal) == 1
    assert count(metrics, name, decision="refused", reason="memory_pressure", **normal) == 1


def test_failures_and_retries_are_counted_and_failures_logged(
    hub: EventDispatcher, metrics: Metrics, lines: Lines
) -> None:
    hub.emit(AttemptFailed("local", FailureKind.CUDA_OOM, 1, False, "OutOfMemoryError"))
    hub.emit(Retried("local", FailureKind.CUDA_OOM))
    assert count(metrics, "sluice_backend_failures_total", backend="local", kind="cuda_oom") == 1
    assert count(metrics, "sluice_retries_total") == 1
    assert [(level, words) for level, words, _ in lines.lines] == [("warning", "attempt failed")]


def test_the_ledgers_rows_are_counted_and_losses_are_errors(
    hub: EventDispatcher, metrics: Metrics, lines: Lines
) -> None:
    hub.emit(RowsWritten(count=5))
    hub.emit(WriteFailed(error_type="OperationalError", failures=1, depth=3))
    hub.emit(DatabaseIsBack(failures=1))
    hub.emit(JournalIsBack())
    hub.emit(RowsLost(count=2, reason=LossReason.OUTBOX_FULL, generation_ids=("gen_1", "gen_2")))
    assert count(metrics, "sluice_ledger_rows_total", result="written") == 5
    assert count(metrics, "sluice_ledger_rows_total", result="lost") == 2
    assert count(metrics, "sluice_ledger_write_failures_total") == 1
    assert [(level, words) for level, words, _ in lines.lines] == [
        ("warning", "ledger write failed"),
        ("info", "ledger written again"),
        ("info", "ledger journal written again"),
        ("error", "usage rows lost"),
    ]


def test_an_event_that_nobody_counts_is_ignored(hub: EventDispatcher, lines: Lines) -> None:
    hub.emit(object())
    assert lines.lines == []


def test_an_event_that_cannot_be_recorded_is_counted_and_raises_no_error_in_its_emitter(
    hub: EventDispatcher, metrics: Metrics, lines: Lines, record: Make
) -> None:
    def broken() -> Mapping[str, SloTargets]:
        raise TypeError("no targets")

    metrics.slo.targets = broken
    hub.emit(record())
    metrics.slo.targets = dict
    assert count(metrics, "sluice_telemetry_errors_total", event="RequestRecord") == 1
    assert lines.lines[0][2]["error_type"] == "TypeError"


def test_a_record_that_cannot_be_counted_is_counted_as_such_and_the_scrape_shows_the_rest(
    hub: EventDispatcher, metrics: Metrics, record: Make
) -> None:
    hub.emit(record(total_ms=None))
    assert b"sluice_build_info" in metrics.render()
    assert count(metrics, "sluice_telemetry_errors_total", event="RequestRecord") == 1
