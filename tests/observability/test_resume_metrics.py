"""Answers that were gone on with, as a figure, a log line and events of the trace."""

from __future__ import annotations

import random
from collections.abc import Callable

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from observability.events import RequestRecord, SeamFact
from observability.metrics import Metrics
from observability.subscribers import Hub
from observability.tracing import Tracing
from resilience.events import Resumed
from tests.observability.test_subscribers import Lines, count

Make = Callable[..., RequestRecord]
START_NS = 1_700_000_000_000_000_000


def test_a_continuation_is_counted_by_its_backends_mode_and_end_and_logged() -> None:
    metrics, lines = Metrics(version="1", known_backends=["local", "bedrock"]), Lines()
    Hub(metrics, log=lines).emit(Resumed("local", "bedrock", "text", "whole", 17))
    labels = {"from": "local", "to": "bedrock", "mode": "text", "result": "whole"}
    assert count(metrics, "sluice_resumed_streams_total", **labels) == 1
    [(level, event, values)] = lines.lines
    assert (level, event, values["tokens"]) == ("info", "answer gone on with", 17)


def test_a_trace_shows_each_seam_where_it_was(record: Make) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(None, "1", rng=random.Random(1), unix_ns=lambda: START_NS, exporter=exporter)
    seams = (
        SeamFact(12.5, "local", "local", "exact", 3),
        SeamFact(40.0, "local", "bedrock", "text", 9),
    )
    tracing.finish(tracing.begin(), record(seams=seams))
    assert tracing.shutdown()
    [root] = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert root.attributes is not None and root.attributes["sluice.seams"] == 2
    assert [event.timestamp - START_NS for event in root.events] == [12_500_000, 40_000_000]
    assert root.events[1].attributes == {
        "sluice.seam.from": "local",
        "sluice.seam.to": "bedrock",
        "sluice.seam.mode": "text",
        "sluice.seam.tokens": 9,
    }


def test_a_request_without_a_seam_says_nothing_of_seams(record: Make) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(None, "1", rng=random.Random(1), unix_ns=lambda: START_NS, exporter=exporter)
    tracing.finish(tracing.begin(), record())
    assert tracing.shutdown()
    [root] = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert root.attributes is not None and "sluice.seams" not in root.attributes
    assert root.events == ()
