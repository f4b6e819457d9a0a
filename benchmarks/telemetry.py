"""What one finished request costs in metrics, its log line and its spans: ``python -m benchmarks.telemetry``.

Prints microseconds a request for each part, and its share of the CPU that a request may cost in all.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from observability.events import RequestRecord
from observability.logs import configure_logging
from observability.logwriter import GATHER_S
from observability.metrics import Metrics
from observability.subscribers import Hub
from observability.tracing import Tracing

# The whole journey's bar: CPU of a request on the gateway, microseconds.
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
    def export(self, spans: object) -> SpanExportResult:
        """Takes everything."""
        return SpanExportResult.SUCCESS


def _dropped(record: RequestRecord) -> None:
    """A log that writes nothing."""


def microseconds(work: Callable[[], object], requests: int) -> float:
    """CPU of one call, all threads counted: the median of :data:`ROUNDS` rounds."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(requests):
            work()
        time.sleep(3 * GATHER_S)  # costs nothing, and lets the log's thread write its share
        rounds.append((time.process_time() - began) / requests * 1e6)
    return statistics.median(rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5_000, help="calls a round")
    requests = parser.parse_args().requests

    metrics = Metrics(version="benchmark")
    quiet = Hub(metrics, log_request=_dropped)
    logs = configure_logging("info", json=True, stream=io.StringIO())
    loud = Hub(Metrics(version="benchmark"))
    ids_only, exporting = Tracing(None, "benchmark"), Tracing(None, "benchmark", exporter=_Nowhere())

    def spans(tracing: Tracing) -> None:
        tracing.finish(tracing.begin(), RECORD)

    counted = microseconds(lambda: quiet.emit(RECORD), requests)
    logged = microseconds(lambda: loud.emit(RECORD), requests)
    parts = {
        "metrics": counted,
        "log line (written by its thread)": logged - counted,
        "trace id, no collector": microseconds(lambda: spans(ids_only), requests),
        "spans, with a collector": microseconds(lambda: spans(exporting), requests),
        "one scrape": microseconds(metrics.render, max(1, requests // 100)),
    }
    logs.close()
    if logs.dropped:
        raise SystemExit(f"{logs.dropped} lines were dropped: take fewer --requests")
    exporting.shutdown()
    for name, took_us in parts.items():
        share = took_us / WHOLE_REQUEST_US
        print(f"{name:34} {took_us:9.1f} us   {share:6.1%} of a request's {WHOLE_REQUEST_US:g} us")


if __name__ == "__main__":
    main()
