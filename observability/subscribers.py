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

from accounting.events import (
    JournalFailed,
    JournalRefused,
    JournalSynced,
    RowsLost,
    RowsReplayed,
    RowsWritten,
    WriteFailed,
)
from adapters.events import (
    AdapterAsked,
    AdapterLoaded,
    AdapterLoadFailed,
    AdapterReplacedByBase,
    AdapterUnloaded,
)
from admission.events import Admitted, FirstToken, RefusedEvent
from observability.events import RequestRecord
from observability.metrics import Metrics
from observability.requestlog import RequestLog
from observability.sampler import Sampler
from observability.trace_facts import EdgeRecord
from resilience.events import (
    AttemptFailed,
    Degenerated,
    LoadScaled,
    Recovered,
    Resumed,
    Retried,
    RetryRefused,
)
from resilience.failures import POLICIES, FailureKind, HealthEffect
from resilience.leg_limits import LegSkipped
from resilience.response_cache_values import AnswersLost, LookedUp, StoreBroke, StoreIsBack
from resilience.supervisor_events import EngineGivenUp, EngineLost, EngineRestarted, EngineRestarting


class Log(Protocol):
    """What is needed of a structlog logger."""

    def info(self, event: str, **values: Any) -> object:
        """Something that happens all day."""

    def warning(self, event: str, **values: Any) -> object:
        """Something to look at when there are many."""

    def error(self, event: str, **values: Any) -> object:
        """Something to look at."""


class EventDispatcher:
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
                EdgeRecord: self._edge,
                Admitted: self._admitted,
                RefusedEvent: self._refused,
                FirstToken: self._first_token,
                AttemptFailed: self._attempt_failed,
                Retried: metrics.resilience.retried,
                RetryRefused: metrics.resilience.retry_refused,
                Recovered: metrics.resilience.recovered,
                Resumed: self._resumed,
                LoadScaled: self._load_scaled,
                Degenerated: self._degenerated,
                EngineLost: self._engine_lost,
                EngineRestarting: self._engine_restarting,
                EngineRestarted: self._engine_restarted,
                EngineGivenUp: self._engine_given_up,
                LookedUp: metrics.answers.looked_up,
                AnswersLost: self._answers_lost,
                StoreBroke: self._store_broke,
                StoreIsBack: self._store_is_back,
                LegSkipped: self._leg_skipped,
                AdapterAsked: metrics.adapters.asked,
                AdapterLoaded: self._adapter_loaded,
                AdapterLoadFailed: self._adapter_load_failed,
                AdapterUnloaded: self._adapter_unloaded,
                AdapterReplacedByBase: metrics.adapters.replaced,
                RowsWritten: self._rows_written,
                RowsLost: self._rows_lost,
                WriteFailed: self._write_failed,
                JournalSynced: metrics.ledger.synced,
                JournalFailed: self._journal_failed,
                JournalRefused: self._journal_refused,
                RowsReplayed: self._rows_replayed,
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
        self._metrics.admission.admitted(event)
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
        self._metrics.resilience.attempt_failed(event)
        if event.kind is FailureKind.CANCELLED_BY_CLIENT:
            return  # the request's own line tells it
        # What an operator must mend is an error each time; the rest is one when there is much of it.
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
        self._metrics.resilience.load_scaled(event)
        self._log.warning("load scaled", backend=event.backend, factor=round(event.factor, 3))

    def _degenerated(self, event: Degenerated) -> None:
        self._metrics.resilience.degenerated(event)
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
        self._metrics.supervision.restarting(event)
        self._log.warning(
            "engine restarting",
            reason=event.reason.value,
            detail=event.detail,
            exit_code=event.exit_code,
            attempt=event.attempt,
            wait_s=event.wait_s,
        )

    def _engine_restarted(self, event: EngineRestarted) -> None:
        self._metrics.supervision.restarted(event)
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
        self._metrics.resume.resumed(event)
        self._log.info(
            "answer gone on with",
            source=event.source,
            target=event.target,
            mode=event.mode,
            result=event.result,
            tokens=event.tokens,
        )

    def _answers_lost(self, event: AnswersLost) -> None:
        self._metrics.answers.lost(event)
        if event.reason == "defect":
            self._log.error("answers not kept", count=event.count, error_type=event.error_type)

    def _store_broke(self, event: StoreBroke) -> None:
        self._log.warning("response cache not reached", error_type=event.error_type)

    def _store_is_back(self, event: StoreIsBack) -> None:
        self._log.info("response cache reached again")

    def _leg_skipped(self, event: LegSkipped) -> None:
        self._metrics.answers.skipped(event)
        more = self._refusals.take((event.leg, event.reason))
        if more is not None:
            self._log.info(
                "fallback leg passed over at its limit", leg=event.leg, reason=event.reason, more_since=more
            )

    def _adapter_loaded(self, event: AdapterLoaded) -> None:
        self._metrics.adapters.loaded(event)
        self._log.info(
            "adapter loaded", adapter=event.adapter_id, load_s=round(event.load_s, 3), ahead=event.ahead
        )

    def _adapter_load_failed(self, event: AdapterLoadFailed) -> None:
        self._metrics.adapters.load_failed(event)
        self._log.error(
            "adapter not loaded",
            adapter=event.adapter_id,
            reason=event.code,
            detail=event.detail,
            retry_after_s=event.retry_after_s,
        )

    def _adapter_unloaded(self, event: AdapterUnloaded) -> None:
        self._metrics.adapters.unloaded(event)
        self._log.info("adapter unloaded", adapter=event.adapter_id, reason=event.reason)

    def _rows_written(self, event: RowsWritten) -> None:
        self._metrics.ledger_rows("written", event.count)

    def _write_failed(self, event: WriteFailed) -> None:
        self._metrics.ledger_write_failed()
        self._log.warning(
            "ledger write failed", error_type=event.error_type, failures=event.failures, depth=event.depth
        )

    def _journal_failed(self, event: JournalFailed) -> None:
        self._metrics.ledger.failed(event)
        self._log.error("ledger journal failed", error_type=event.error_type, rows=event.rows)

    def _journal_refused(self, event: JournalRefused) -> None:
        self._metrics.ledger.refused(event)
        more = self._refusals.take(("journal", event.reason.value))
        if more is not None:
            self._log.error("usage row not journaled", reason=event.reason.value, more_since=more)

    def _rows_replayed(self, event: RowsReplayed) -> None:
        self._metrics.ledger.replayed(event)
        self._log.info("ledger journal read back", rows=event.count, adopted=event.adopted)
        if event.damaged_bytes:
            self._log.error("ledger journal damaged, set aside", damaged_bytes=event.damaged_bytes)

    def _rows_lost(self, event: RowsLost) -> None:
        self._metrics.ledger_rows("lost", event.count)
        self._metrics.ledger.lost(event.count)
        self._log.error(
            "usage rows lost",
            count=event.count,
            reason=event.reason.value,
            generation_ids=list(event.generation_ids),
        )
