"""Resumed answers, as a metric and a log line."""

from __future__ import annotations

from observability.metrics import Metrics
from observability.subscribers import EventDispatcher
from resilience.events import Resumed
from tests.observability.test_subscribers import Lines, count


def test_a_continuation_is_counted_by_its_backends_mode_and_end_and_logged() -> None:
    metrics, lines = Metrics(version="1", known_backends=["local", "bedrock"]), Lines()
    EventDispatcher().record(metrics, log=lines).emit(Resumed("local", "bedrock", "text", "whole", 17))
    labels = {"from": "local", "to": "bedrock", "mode": "text", "result": "whole"}
    assert count(metrics, "sluice_resumed_streams_total", **labels) == 1
    [(level, event, values)] = lines.lines
    assert (level, event, values["tokens"]) == ("info", "answer resumed", 17)
