"""Metrics and log lines of an engine that is restarted."""

from __future__ import annotations

from typing import Any

from observability.collectors import engine_state_families
from observability.metrics import Metrics
from observability.scrape import ScrapeCollector
from observability.subscribers import EventDispatcher
from resilience.supervisor import (
    EngineGivenUp,
    EngineLost,
    EngineRestarted,
    EngineRestarting,
    Loss,
    SupervisorState,
)


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


def test_a_restart_is_counted_by_its_reason_timed_and_logged() -> None:
    metrics, log = Metrics(version="1"), Lines()
    hub = EventDispatcher().record(metrics, log=log)
    hub.emit(EngineLost(Loss.STOPPED, "pids 7"))
    hub.emit(EngineRestarting(Loss.STOPPED, 1, 0.0, -9, "pids 7", "local"))
    hub.emit(EngineRestarted(1, 1.5, 2.25, "local", total_blocks=96))
    text = metrics.render().decode()
    assert 'sluice_engine_restarts_total{backend="local",reason="stopped"} 1.0' in text
    assert "sluice_engine_restart_seconds_sum 2.25" in text
    assert "sluice_telemetry_errors_total{" not in text
    assert [(level, event) for level, event, _ in log.lines] == [
        ("error", "engine lost"),
        ("warning", "engine restarting"),
        ("warning", "engine restarted"),
    ]
    assert log.lines[1][2] == {
        "backend": "local", "reason": "stopped", "detail": "pids 7", "exit_code": -9, "attempt": 1,
        "wait_s": 0.0,
    }  # fmt: skip
    assert log.lines[2][2] == {
        "backend": "local", "attempt": 1, "load_s": 1.5, "away_s": 2.25, "total_blocks": 96
    }  # fmt: skip


def test_an_engine_given_up_is_an_error_line_that_says_what_to_do() -> None:
    log = Lines()
    EventDispatcher().record(Metrics(version="1"), log=log).emit(
        EngineGivenUp(Loss.EXITED, 5, 1, "out of luck")
    )
    [(level, event, values)] = log.lines
    assert level == "error" and "restart the gateway" in event
    assert values["restarts_last_hour"] == 5 and values["exit_code"] == 1


def test_exactly_one_state_holds_and_without_an_engine_none_is_shown() -> None:
    metrics = Metrics(version="1")
    assert "sluice_engine_state{" not in metrics.render().decode()
    metrics.registry.register(
        ScrapeCollector(engine_state_families, lambda: {"local": SupervisorState.RESTARTING})
    )
    shown = [
        line for line in metrics.render().decode().splitlines() if line.startswith("sluice_engine_state{")
    ]
    assert len(shown) == len(SupervisorState)
    assert [line for line in shown if line.endswith(" 1.0")] == [
        'sluice_engine_state{backend="local",state="restarting"} 1.0'
    ]
