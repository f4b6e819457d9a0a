"""One root span per customer-visible response, a child per stage; built by hand when the request is over.

A request carries a :class:`RootSpan` from arrival on: its ids and when it began. All the work happens once,
in :meth:`Tracing.finish`, from the finished record; nothing is done per token. A request that never reaches
``finish`` leaves nothing behind.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from observability.events import RequestRecord
from observability.traceparent import SAMPLED, format_traceparent, parse_traceparent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from observability.spans import SpanSender

SHUTDOWN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RootSpan:
    """A request's place in its trace, known from arrival on.

    Args:
        trace_id: 32 hex digits, the caller's when it sent a valid ``traceparent``.
        span_id: 16 hex digits, this response's root span.
        parent_id: the caller's span, if any.
        flags: the byte of flags that is handed on.
        started_ns: nanoseconds since 1970.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    flags: int
    started_ns: int

    @property
    def traceparent(self) -> str:
        """The header for those that this request calls."""
        return format_traceparent(self.trace_id, self.span_id, self.flags)


class Tracing:
    """Makes trace ids, and spans when there is a collector.

    Args:
        otlp_endpoint: an OTLP/HTTP collector, ``http://collector:4318`` (``/v1/traces`` is added when it has
            no path); ``None`` makes ids only.
        service_version: told to the collector.
        rng: where ids come from; seeded by the system when absent.
        unix_ns: nanoseconds since 1970.
        exporter: used instead of OTLP (tests).

    Every response has its root span: the caller's ``sampled`` flag is handed on, but does not silence ours,
    so that no caller can hide from the operator.

    Raises:
        ValueError: ``otlp_endpoint`` is not an http(s) URL.
    """

    def __init__(
        self,
        otlp_endpoint: str | None,
        service_version: str,
        *,
        rng: random.Random | None = None,
        unix_ns: Callable[[], int] = time.time_ns,
        exporter: SpanExporter | None = None,
    ) -> None:
        self._rng = rng if rng is not None else random.Random()
        self._unix_ns = unix_ns
        self._sender: SpanSender | None = None
        if otlp_endpoint is not None or exporter is not None:
            # Imported here: 130 ms of start-up that only those with a collector pay.
            from observability.spans import SpanSender

            self._sender = SpanSender(
                otlp_endpoint, service_version, new_span_id=lambda: self._id(64), exporter=exporter
            )

    @property
    def exporting(self) -> bool:
        """Whether spans go anywhere."""
        return self._sender is not None

    def begin(self, traceparent: str | None = None, *, trace_id: str | None = None) -> RootSpan:
        """A new root span, starting now; below the caller's when ``traceparent`` is valid.

        ``trace_id`` is one (32 hex digits) that has been told already; a valid ``traceparent`` wins.
        """
        parent = parse_traceparent(traceparent)
        sampled = SAMPLED if self._sender is not None else 0
        if parent is None:
            told = trace_id or f"{self._id(128):032x}"
            return RootSpan(told, f"{self._id(64):016x}", None, sampled, self._unix_ns())
        return RootSpan(
            parent.trace_id,
            f"{self._id(64):016x}",
            parent.span_id,
            parent.flags | sampled,
            self._unix_ns(),
        )

    def finish(self, root: RootSpan, record: RequestRecord) -> None:
        """End ``root`` with what became of the request; a child for each stage. Call once; never blocks."""
        if self._sender is not None:
            self._sender.send(
                record,
                trace_id=int(root.trace_id, 16),
                span_id=int(root.span_id, 16),
                parent_id=None if root.parent_id is None else int(root.parent_id, 16),
                started_ns=root.started_ns,
            )

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> bool:
        """Send what waits, for at most ``timeout_s``; blocks, so use a thread. Whether all was handed on."""
        return self._sender is None or self._sender.shutdown(timeout_s)

    def _id(self, bits: int) -> int:
        return self._rng.getrandbits(bits) or 1
