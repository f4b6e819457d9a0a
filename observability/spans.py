"""Spans of finished requests, sent to an OTLP collector in the background; imported only where there is one.

Spans are built whole and at once as the SDK's read-only spans: opening and closing each through a tracer
costs four times as much (``benchmarks.telemetry``) and keeps objects alive for the length of a request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from observability.attributes import attributes, span_name
from observability.events import RequestRecord

# Spans that wait for the collector; the oldest go first. At ten spans a request, a second of 400 requests.
MAX_QUEUED_SPANS = 4_096
MAX_BATCH_SPANS = 512
BATCH_DELAY_MS = 1_000
# Longest that one export may take, its retries included; a thread of its own waits, no request does.
EXPORT_TIMEOUT_S = 5.0

# Stages whose span is a call to somebody else.
CLIENT_STAGES = frozenset({"generate"})

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)


class SpanSender:
    """Builds spans and queues them; a thread sends them in batches.

    Args:
        otlp_endpoint: the collector; see :func:`traces_url`.
        service_version: told to the collector.
        new_span_id: 64-bit ids, not 0.
        exporter: used instead of OTLP (tests).

    Raises:
        ValueError: ``otlp_endpoint`` is not an http(s) URL.
    """

    def __init__(
        self,
        otlp_endpoint: str | None,
        service_version: str,
        *,
        new_span_id: Callable[[], int],
        exporter: SpanExporter | None = None,
    ) -> None:
        if exporter is None:
            exporter = OTLPSpanExporter(traces_url(otlp_endpoint or ""), timeout=EXPORT_TIMEOUT_S)
        self._new_span_id = new_span_id
        self._resource = Resource.create({"service.name": "sluice", "service.version": service_version})
        self._scope = InstrumentationScope("sluice", service_version)
        self._processor = BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=BATCH_DELAY_MS,
            max_export_batch_size=MAX_BATCH_SPANS,
        )

    def send(
        self, record: RequestRecord, *, trace_id: int, span_id: int, parent_id: int | None, started_ns: int
    ) -> None:
        """Queue the root span and a child for each stage, one behind the other from ``started_ns`` on."""
        root = SpanContext(trace_id, span_id, False, _SAMPLED)
        at_ns = started_ns
        for stage, took_ms in record.stage_ms.items():
            began_ns, at_ns = at_ns, at_ns + round(took_ms * 1e6)
            self._processor.on_end(
                ReadableSpan(
                    stage,
                    context=SpanContext(trace_id, self._new_span_id(), False, _SAMPLED),
                    parent=root,
                    resource=self._resource,
                    kind=SpanKind.CLIENT if stage in CLIENT_STAGES else SpanKind.INTERNAL,
                    status=_UNSET,
                    start_time=began_ns,
                    end_time=at_ns,
                    instrumentation_scope=self._scope,
                )
            )
        self._processor.on_end(
            ReadableSpan(
                span_name(record),
                context=root,
                parent=None if parent_id is None else SpanContext(trace_id, parent_id, True, _SAMPLED),
                resource=self._resource,
                attributes=attributes(record),
                events=_seams(record, started_ns),
                kind=SpanKind.SERVER,
                status=Status(StatusCode.ERROR, record.error_code) if record.failed else _UNSET,
                start_time=started_ns,
                end_time=started_ns + round(record.total_ms * 1e6),
                instrumentation_scope=self._scope,
            )
        )

    def shutdown(self, timeout_s: float) -> bool:
        """Send what waits, for at most ``timeout_s``; blocks. Whether all was handed on."""
        # The SDK's own limit is 30 s and cannot be set from here.
        sender = threading.Thread(target=self._processor.shutdown, name="trace-shutdown", daemon=True)
        sender.start()
        sender.join(timeout_s)
        return not sender.is_alive()


def _seams(record: RequestRecord, started_ns: int) -> Sequence[Event]:
    return [
        Event(
            "sluice.seam",
            {
                "sluice.seam.from": seam.source,
                "sluice.seam.to": seam.target,
                "sluice.seam.mode": seam.mode,
                "sluice.seam.tokens": seam.tokens,
            },
            started_ns + round(seam.after_ms * 1e6),
        )
        for seam in record.seams or ()
    ]


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to; ``/v1/traces`` when ``endpoint`` has no path. Raises ValueError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            "tracing.otlp_endpoint: not an http(s) URL; allowed: http://HOST:PORT, or null for none"
        )
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else endpoint
