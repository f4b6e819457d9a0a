"""Admission's events and gates as metrics and sampled log lines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from admission.events import Admitted, FirstToken, RefusedEvent
from admission.values import Reason
from observability.admission_metrics import GateFigures, gate_families
from observability.metrics import Metrics
from observability.scrape import ScrapeCollector
from observability.subscribers import MAX_KINDS, EventDispatcher, Sampler

ADMITTED = Admitted("local", "acme", 1, 0.0, 3, 0.5, 2, waited_s=0.03, shrunk=True)
PUSHED_OUT = RefusedEvent("local", "acme", -1, Reason.LOW_PRIORITY_SHED, 1.0, 1.2, 9, 0.5, 4, queued=True)
FIGURES = GateFigures(
    name="local",
    queued={"high": 1, "normal": 2},
    waiting_tokens=900,
    in_flight=4,
    limit=8,
    rungs={"": 1, "batch": 3},
    factor=0.7,
    circuit="half_open",
    kv_usage=0.5,
    kv_forecast=0.75,
    prefill_backlog=1200,
    pace=1.25,
)


class Lines:
    """A logger that stores its lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **values: Any) -> None:
        self.lines.append((event, values))

    warning = error = info


def hub(clock: list[float]) -> tuple[EventDispatcher, Metrics, Lines]:
    metrics, lines = Metrics(version="1"), Lines()
    return (
        EventDispatcher().record(metrics, log=lines, log_request=lambda record: None, clock=lambda: clock[0]),
        metrics,
        lines,
    )


def test_decisions_waits_and_errors_of_estimates_are_counted() -> None:
    taken, metrics, _ = hub([0.0])
    for event in (ADMITTED, PUSHED_OUT, FirstToken(0.2, 0.5)):
        taken.emit(event)
    text = metrics.render().decode()
    for line in (
        'sluice_admission_decisions_total{class="high",decision="admitted",reason="none"} 1.0',
        'sluice_admission_decisions_total{class="low",decision="refused",reason="low_priority_shed"} 1.0',
        'sluice_admission_left_queue_total{backend="local",reason="low_priority_shed"} 1.0',
        'sluice_admission_shrunk_total{backend="local"} 1.0',
        'sluice_admission_wait_seconds_bucket{class="high",le="0.025"} 0.0',
        'sluice_admission_wait_seconds_bucket{class="high",le="0.05"} 1.0',
        'sluice_admission_ttft_error_seconds_bucket{le="0.4"} 1.0',
        'sluice_admission_ttft_error_seconds_bucket{le="0.2"} 0.0',
    ):
        assert line in text, line


def test_the_state_of_the_gates_is_read_when_scraped() -> None:
    _, metrics, _ = hub([0.0])
    metrics.registry.register(ScrapeCollector(gate_families, lambda: [FIGURES]))
    text = metrics.render().decode()
    for line in (
        'sluice_admission_queue_depth{backend="local",class="normal"} 2.0',
        'sluice_admission_queue_depth{backend="local",class="low"} 0.0',
        'sluice_admission_circuit{backend="local",state="half_open"} 1.0',
        'sluice_admission_circuit{backend="local",state="open"} 0.0',
        'sluice_admission_waiting_tokens{backend="local"} 900.0',
        'sluice_admission_limit{backend="local"} 8.0',
        'sluice_admission_rung{backend="local",route=""} 1.0',
        'sluice_admission_rung{backend="local",route="batch"} 3.0',
        'sluice_admission_factor{backend="local"} 0.7',
        'sluice_admission_kv_forecast{backend="local"} 0.75',
        'sluice_admission_prefill_backlog_tokens{backend="local"} 1200.0',
        'sluice_admission_pace{backend="local"} 1.25',
    ):
        assert line in text, line
    _, metrics, _ = hub([0.0])
    metrics.registry.register(ScrapeCollector(gate_families, lambda: [replace(FIGURES, pace=None)]))
    assert 'sluice_admission_pace{backend="local"}' not in metrics.render().decode()


def test_one_refusal_a_second_is_logged_with_the_number_of_the_others() -> None:
    clock = [10.0]
    taken, _, lines = hub(clock)
    for _ in range(50):
        taken.emit(PUSHED_OUT)
    clock[0] = 11.1
    taken.emit(PUSHED_OUT)
    assert [line for line, _ in lines.lines] == ["request refused"] * 2
    assert [values["more_since"] for _, values in lines.lines] == [0, 49]
    assert lines.lines[0][1]["reason"] == "low_priority_shed"


def test_a_sampler_remembers_no_more_kinds_than_it_may() -> None:
    sampler = Sampler(lambda: 0.0)
    assert [sampler.take(kind) for kind in range(MAX_KINDS)] == [0] * MAX_KINDS
    assert sampler.take("one more") == 0
    assert sampler.take("yet another") is None
