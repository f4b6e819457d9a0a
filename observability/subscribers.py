"""Where every event arrives: the metrics count it, and some events also become a log line.

An event without a counter and a log line is ignored on purpose: a leaf may emit more than is counted yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from accounting.events import JournalFailed, JournalRefused, RowsLost, RowsReplayed, WriteFailed
from adapters.events import AdapterLoaded, AdapterLoadFailed, AdapterUnloaded
from admission.events import Admitted, RefusedEvent
from observability.events import RequestRecord
from observability.metrics import Metrics
from observability.requestlog import RequestLog
from observability.sampler import Sampler
from observability.trace_facts import EdgeRecord
from resilience.events import AttemptFailed, Degenerated, LoadScaled, Resumed
from resilience.failures import POLICIES, FailureKind, HealthEffect
from resilience.leg_limits import LegSkipped
from resilience.response_cache_values import AnswersLost, StoreBroke, StoreIsBack
from resilience.supervisor import EngineGivenUp, EngineLost, EngineRestarted, EngineRestarting


class Log(Protocol):
    """The used part of a structlog logger."""

    def info(self, event: str, **values: Any) -> object:
        """Log an everyday event."""

    def warning(self, event: str, **values: Any) -> object:
        """Log an event that matters when it is frequent."""

    def error(self, event: str, **values: Any) -> object:
        """Log an event that an operator should look at."""


class EventDispatcher:
    """Counts and logs events; leaves and journey are given its :meth:`emit`.

    Args:
        metrics: counts the events.
        log: takes the log lines; structlog's ``sluice`` logger when absent.
        log_request: takes each finished request; the same logger, without structlog's processors, when
            absent.
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
        self._refusals = Sampler(clock)
        loggers: dict[type, Callable[[Any], object]] = {
            RequestRecord: log_request or RequestLog(logging.getLogger("sluice")),
            EdgeRecord: self._edge,
            Admitted: self._admitted,
            RefusedEvent: self._refused,
            AttemptFailed: self._attempt_failed,
            Resumed: self._resumed,
            LoadScaled: self._load_scaled,
            Degenerated: self._degenerated,
            EngineLost: self._engine_lost,
            EngineRestarting: self._engine_restarting,
            EngineRestarted: self._engine_restarted,
            EngineGivenUp: self._engine_given_up,
            AnswersLost: self._answers_lost,
            StoreBroke: self._store_broke,
            StoreIsBack: self._store_is_back,
            LegSkipped: self._leg_skipped,
            AdapterLoaded: self._adapter_loaded,
            AdapterLoadFailed: self._adapter_load_failed,
            AdapterUnloaded: self._adapter_unloaded,
            RowsLost: self._rows_lost,
            WriteFailed: self._write_failed,
            JournalFailed: self._journal_failed,
            JournalRefused: self._journal_refused,
            RowsReplayed: self._rows_replayed,
        }
        self._handlers: dict[type, tuple[Callable[[Any], object], ...]] = {
            kind: (*metrics.updates.get(kind, ()), *([loggers[kind]] if kind in loggers else ()))
            for kind in {*metrics.updates, *loggers}
        }

    def emit(self, event: object) -> None:
        """Record ``event``. Never blocks and never raises, so that the emitter cannot fail because of it.

        An error in here is counted in ``sluice_telemetry_errors_total`` and logged by its class.
        """
        try:
            for handle in self._handlers.get(type(event), ()):
                handle(event)
        except Exception as error:
            name = type(event).__name__
            self._metrics.emit_error(name)
            self._log.error("event not recorded", kind=name, error_type=type(error).__name__)

    def _edge(self, record: EdgeRecord) -> None:
        (self._log.error if record.failed else self._log.info)(
            "http request",
            request_id=record.request_id,
            trace_id=record.trace_id,
            method=record.method,
            path=record.path,
            status=record.status,
            total_ms=round(record.total_ms, 3),
            **({} if record.error_code is None else {"error_code": record.error_code}),
        )

    def _admitted(self, event: Admitted) -> None:
        if event.beyond is None:
            return
        more = self._refusals.take((event.backend, event.beyond))
        if more is not None:
            self._log.info(
                "request handed on beyond the memory forecast",
                backend=event.backend,
                reason=event.beyond,
                priority=event.priority,
                in_flight=event.in_flight,
                kv_usage=round(event.kv_usage, 3),
                more_since=more,
            )

    def _refused(self, event: RefusedEvent) -> None:
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

    def _attempt_failed(self, event: AttemptFailed) -> None:
        if event.kind is FailureKind.CANCELLED_BY_CLIENT:
            return  # the request's own log line shows it
        # A failure that an operator must fix is an error each time; others matter only when they are
        # frequent.
        misconfigured = POLICIES[event.kind].health is HealthEffect.MISCONFIGURED
        (self._log.error if misconfigured else self._log.warning)(
            "attempt failed",
            backend=event.backend,
            kind=event.kind.value,
            attempt=event.attempt,
            delivered=event.delivered,
            error_type=event.error_type,
        )

    def _load_scaled(self, event: LoadScaled) -> None:
        self._log.warning("load scaled", backend=event.backend, factor=round(event.factor, 3))

    def _degenerated(self, event: Degenerated) -> None:
        self._log.warning(
            "degenerate answer",
            backend=event.backend,
            sign=event.sign.value,
            action=event.action,
            tokens=event.tokens,
        )

    def _engine_lost(self, event: EngineLost) -> None:
        self._log.error("engine lost", reason=event.reason.value, detail=event.detail)

    def _engine_restarting(self, event: EngineRestarting) -> None:
        self._log.warning(
            "engine restarting",
            reason=event.reason.value,
            detail=event.detail,
            exit_code=event.exit_code,
            attempt=event.attempt,
            wait_s=event.wait_s,
        )

    def _engine_restarted(self, event: EngineRestarted) -> None:
        self._log.warning(
            "engine restarted",
            attempt=event.attempt,
            load_s=round(event.load_s, 2),
            away_s=round(event.away_s, 2),
        )

    def _engine_given_up(self, event: EngineGivenUp) -> None:
        self._log.error(
            "engine given up: it is not started again; find out why it dies, then restart the gateway",
            reason=event.reason.value,
            detail=event.detail,
            exit_code=event.exit_code,
            restarts_last_hour=event.restarts,
        )

    def _resumed(self, event: Resumed) -> None:
        self._log.info(
            "answer gone on with",
            source=event.source,
            target=event.target,
            mode=event.mode,
            result=event.result,
            tokens=event.tokens,
        )

    def _answers_lost(self, event: AnswersLost) -> None:
        if event.reason == "defect":
            self._log.error("answers not kept", count=event.count, error_type=event.error_type)

    def _store_broke(self, event: StoreBroke) -> None:
        self._log.warning("response cache not reached", error_type=event.error_type)

    def _store_is_back(self, event: StoreIsBack) -> None:
        self._log.info("response cache reached again")

    def _leg_skipped(self, event: LegSkipped) -> None:
        more = self._refusals.take((event.leg, event.reason))
        if more is not None:
            self._log.info(
                "fallback leg passed over at its limit", leg=event.leg, reason=event.reason, more_since=more
            )

    def _adapter_loaded(self, event: AdapterLoaded) -> None:
        self._log.info(
            "adapter loaded", adapter=event.adapter_id, load_s=round(event.load_s, 3), ahead=event.ahead
        )

    def _adapter_load_failed(self, event: AdapterLoadFailed) -> None:
        self._log.error(
            "adapter not loaded",
            adapter=event.adapter_id,
            reason=event.code,
            detail=event.detail,
            retry_after_s=event.retry_after_s,
        )

    def _adapter_unloaded(self, event: AdapterUnloaded) -> None:
        self._log.info("adapter unloaded", adapter=event.adapter_id, reason=event.reason)

    def _write_failed(self, event: WriteFailed) -> None:
        self._log.warning(
            "ledger write failed", error_type=event.error_type, failures=event.failures, depth=event.depth
        )

    def _journal_failed(self, event: JournalFailed) -> None:
        self._log.error("ledger journal failed", error_type=event.error_type, rows=event.rows)

    def _journal_refused(self, event: JournalRefused) -> None:
        more = self._refusals.take(("journal", event.reason.value))
        if more is not None:
            self._log.error("usage row not journaled", reason=event.reason.value, more_since=more)

    def _rows_replayed(self, event: RowsReplayed) -> None:
        self._log.info("ledger journal read back", rows=event.count, adopted=event.adopted)
        if event.damaged_bytes:
            self._log.error("ledger journal damaged, set aside", damaged_bytes=event.damaged_bytes)

    def _rows_lost(self, event: RowsLost) -> None:
        self._log.error(
            "usage rows lost",
            count=event.count,
            reason=event.reason.value,
            generation_ids=list(event.generation_ids),
        )
