"""Where every event of the house arrives: each becomes figures, and some become a log line.

One table from event type to handler. An event that is not in it is ignored, by this declared choice: a leaf
may tell more than anybody counts yet, and must not fail for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import structlog

from accounting.events import RowsLost, RowsWritten, WriteFailed
from admission.events import Admitted, FirstToken, RefusedEvent
from observability.events import RequestRecord
from observability.metrics import Metrics
from observability.requestlog import RequestLog
from observability.sampler import Sampler
from resilience.events import AttemptFailed, Retried


class Log(Protocol):
    """What is needed of a structlog logger."""

    def info(self, event: str, **values: Any) -> object:
        """Something that happens all day."""

    def warning(self, event: str, **values: Any) -> object:
        """Something to look at when there are many."""

    def error(self, event: str, **values: Any) -> object:
        """Something to look at."""


class Hub:
    """Takes every event; its :meth:`emit` is what leaves and journey are given.

    Args:
        metrics: where figures go.
        log: where lines go; structlog's ``sluice`` logger when absent.
        log_request: takes each finished request; the same logger, by its short way, when absent.
        clock: monotonic seconds; of refusals one line a second is logged for each backend and reason.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        log: Log | None = None,
        log_request: Callable[[RequestRecord], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._log: Log = log if log is not None else structlog.get_logger("sluice")
        self._log_request = (
            log_request if log_request is not None else RequestLog(logging.getLogger("sluice"))
        )
        self._refusals = Sampler(clock)
        self._handlers: Mapping[type, Callable[[Any], None]] = MappingProxyType(
            {
                RequestRecord: self._request,
                Admitted: self._admitted,
                RefusedEvent: self._refused,
                FirstToken: self._first_token,
                AttemptFailed: self._attempt_failed,
                Retried: self._retried,
                RowsWritten: self._rows_written,
                RowsLost: self._rows_lost,
                WriteFailed: self._write_failed,
            }
        )

    def emit(self, event: object) -> None:
        """Record ``event``. Never blocks and never raises: who tells a fact must not fail because of it.

        A handler's error is counted in ``sluice_telemetry_errors_total`` and logged by its class.
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            return
        try:
            handler(event)
        except Exception as error:
            name = type(event).__name__
            self._metrics.emit_error(name)
            self._log.error("event not recorded", kind=name, error_type=type(error).__name__)

    def _request(self, record: RequestRecord) -> None:
        self._metrics.request(record)
        self._log_request(record)

    def _admitted(self, event: Admitted) -> None:
        self._metrics.admission.admitted(event)

    def _refused(self, event: RefusedEvent) -> None:
        self._metrics.admission.refused(event)
        more = self._refusals.take((event.backend, event.reason.value))
        if more is not None:
            self._log.info(
                "request refused",
                backend=event.backend,
                reason=event.reason.value,
                priority=event.priority,
                estimated_wait_ms=round(event.estimated_wait_s * 1000),
                queue_depth=event.queue_depth,
                in_flight=event.in_flight,
                kv_usage=round(event.kv_usage, 3),
                more_since=more,
            )

    def _first_token(self, event: FirstToken) -> None:
        self._metrics.admission.first_token(event)

    def _attempt_failed(self, event: AttemptFailed) -> None:
        self._metrics.backend_failure(event.backend, event.kind.value)
        self._log.warning(
            "attempt failed",
            backend=event.backend,
            kind=event.kind.value,
            attempt=event.attempt,
            delivered=event.delivered,
            error_type=event.error_type,
        )

    def _retried(self, event: Retried) -> None:
        self._metrics.retry()

    def _rows_written(self, event: RowsWritten) -> None:
        self._metrics.ledger_rows("written", event.count)

    def _write_failed(self, event: WriteFailed) -> None:
        self._metrics.ledger_write_failed()
        self._log.warning(
            "ledger write failed", error_type=event.error_type, failures=event.failures, depth=event.depth
        )

    def _rows_lost(self, event: RowsLost) -> None:
        self._metrics.ledger_rows("lost", event.count)
        self._log.error(
            "usage rows lost",
            count=event.count,
            reason=event.reason.value,
            generation_ids=list(event.generation_ids),
        )
