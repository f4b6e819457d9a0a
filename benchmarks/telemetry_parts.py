"""What one finished request costs in metrics, its log line and its spans, in microseconds of CPU.

``python -m benchmarks.telemetry --parts``; also printed is each one's share of a request's CPU limit.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from observability.events import RequestRecord
from observability.logs import configure_logging
from observability.logwriter import GATHER_S
from observability.metrics import Metrics
from observability.subscribers import EventDispatcher
from observability.trace_export import DELAY_S, TraceSender
from observability.tracing import Tracing

# The limit of the whole journey: CPU per request on the gateway, in microseconds.
WHOLE_REQUEST_US = 650.0
ROUNDS = 5

RECORD = RequestRecord(
    request_id="req_9f1b", generation_id="gen_1", trace_id="4bf92f3577b34da6a3ce929d0e0e4736", tenant="shop",
    contract="native", status=200, total_ms=912.4, route="self_hosted_generation", model="demo", revision=7,
    prompt_version="chat-manga-2.1", backend="embedded", backend_name="local", backend_version="demo",
    finish_reason="stop", input_tokens=842, output_tokens=137, cached_tokens=640, queue_wait_ms=3.1,
    ttft_ms=88.0, generation_ms=900.0, overhead_ms=1.2, stream=True,
    stage_ms={
        "canonicalize": 0.1, "plan": 0.4, "lease": 0.02, "rank": 0.03, "admit": 3.2, "generate": 900.0,
        "respond": 0.1, "account": 0.1,
    },
)  # fmt: skip


class _Nowhere(SpanExporter):
    """Encodes spans as OpenTelemetry's exporters do, and discards them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encode the spans."""
        encode_spans(spans).SerializePartialToString()
        return SpanExportResult.SUCCESS


def _dropped(record: RequestRecord) -> None:
    """Write nothing: a log for the benchmark."""


def microseconds(work: Callable[[], object], requests: int) -> float:
    """Return the CPU microseconds of one call, over all threads: the median of :data:`ROUNDS` rounds."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(requests):
            work()
        time.sleep(3 * GATHER_S + 3 * DELAY_S)  # uses no CPU, and lets the threads finish their work
        rounds.append((time.process_time() - began) / requests * 1e6)
    return statistics.median(rounds)


def print_parts(requests: int = 1_500) -> None:
    """Measure, and print the figures; ``requests`` calls per round, fewer than any queue holds."""
    metrics = Metrics(version="benchmark")
    quiet = EventDispatcher().record(metrics, log_request=_dropped)
    logs = configure_logging("info", json=True, stream=io.StringIO())
    loud = EventDispatcher().record(Metrics(version="benchmark"))
    sender = TraceSender(_Nowhere(), resource=Resource.create(), version="benchmark", scrub=str)
    ids_only, exporting = Tracing(), Tracing(sender)
    sampling = Tracing(sender, sample_ratio=0.0)

    def spans(tracing: Tracing) -> None:
        tracing.finish(tracing.begin(), RECORD)

    counted = microseconds(lambda: quiet.emit(RECORD), requests)
    logged = microseconds(lambda: loud.emit(RECORD), requests)
    parts = {
        "metrics": counted,
        "log line (written by its thread)": logged - counted,
        "trace id, no collector": microseconds(lambda: spans(ids_only), requests),
        "trace left out by sampling": microseconds(lambda: spans(sampling), requests),
        "trace, with a collector": microseconds(lambda: spans(exporting), requests),
        "one scrape": microseconds(metrics.render, max(1, requests // 100)),
    }
    logs.close()
    if logs.dropped or exporting.figures.dropped:
        raise SystemExit(f"{logs.dropped} lines, {exporting.figures.dropped} traces were dropped")
    exporting.shutdown()
    for name, took_us in parts.items():
        share = took_us / WHOLE_REQUEST_US
        print(f"{name:34} {took_us:9.1f} us   {share:6.1%} of a request's {WHOLE_REQUEST_US:g} us")
