"""Sampling of traces: a share at the head, by the trace's id, and failed ones at the tail."""

from dataclasses import dataclass

from observability.events import RequestRecord
from observability.trace_facts import EdgeRecord


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Traces by result since the start: accepted by the collector, dropped from the full queue, refused by
    the collector, not sampled; and those in the queue now.
    """

    sent: int = 0
    dropped: int = 0
    failed: int = 0
    left_out: int = 0
    waiting: int = 0


NO_TRACES = TraceFigures()


def head_keeps(trace_id: str, ratio: float) -> bool:
    """Whether a trace is in the sampled share, as OpenTelemetry's ``TraceIdRatioBased`` decides it.

    By the id's lower 64 bits: random also in ids that carry a time in front.
    """
    return ratio >= 1.0 or int(trace_id[16:], 16) < ratio * 18_446_744_073_709_551_616


def tail_keeps(record: RequestRecord | EdgeRecord) -> bool:
    """Whether a request's result is worth a trace: an error, a fallback, a resumed stream."""
    if record.error_code is not None or record.status >= 400:
        return True
    return isinstance(record, RequestRecord) and (
        record.fallback_kind is not None or record.seams is not None
    )
