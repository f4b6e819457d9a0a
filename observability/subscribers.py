"""Where every event of the house arrives: each becomes figures, and some become a log line.

One table from event type to handler. An event that is not in it is ignored, by this declared choice: a leaf
may tell more than anybody counts yet, and must not fail for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Protocol

import structlog

from accounting.events import RowsLost, RowsWritten, WriteFailed
from admission.events import Admitted, RefusedEvent
from observability.events import RequestRecord
from observability.metrics import Metrics
from resilience.events import AttemptFailed, Retried

# A line of a request leaves out what is at rest, so that the line shows what was special about it.
_RECORD_FIELDS = tuple(field.name for field in fields(RequestRecord) if field.name != "stage_ms")


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
    """

    def __init__(self, metrics: Metrics, *, log: Log | None = None) -> None:
        self._metrics = metrics
        self._log: Log = log if log is not None else structlog.get_logger("sluice")
        self._handlers: Mapping[type, Callable[[Any], None]] = MappingProxyType(
            {
                RequestRecord: self._request,
                Admitted: self._admitted,
                RefusedEvent: self._refused,
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
        say = self._log.error if record.failed else self._log.info
        say("request", **request_line(record))

    def _admitted(self, event: Admitted) -> None:
        self._metrics.decision("admitted")

    def _refused(self, event: RefusedEvent) -> None:
        self._metrics.decision("refused", event.reason.value)

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


def request_line(record: RequestRecord) -> dict[str, object]:
    """The fields of a request's log line: those that say something, times rounded to a microsecond."""
    line: dict[str, object] = {}
    for name in _RECORD_FIELDS:
        value = getattr(record, name)
        if value is None or value is False:
            continue
        line[name] = round(value, 3) if isinstance(value, float) else value
    if record.stage_ms:
        line["stage_ms"] = {stage: round(took, 3) for stage, took in record.stage_ms.items()}
    return line
