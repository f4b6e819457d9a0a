"""Passes events to the metrics, which count them, to the log (those of one table), and to other listeners."""

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, Self

import structlog

from accounting.events import (
    DatabaseIsBack,
    JournalFailed,
    JournalIsBack,
    JournalRefused,
    RowsLost,
    RowsReplayed,
    WriteFailed,
)
from adapters.events import AdapterLoaded, AdapterLoadFailed, AdapterUnloaded
from admission.events import Admitted, RefusedEvent
from observability.events import RequestRecord
from observability.metrics import Metrics
from observability.requestlog import log_request as log_finished
from observability.trace_facts import EdgeRecord
from resilience.events import AttemptFailed, Degenerated, LoadScaled, Resumed
from resilience.failures import POLICIES, FailureKind, HealthEffect
from resilience.leg_limits import LegSkipped
from resilience.response_cache_values import AnswersLost, StoreBroke, StoreIsBack
from resilience.supervisor import EngineGivenUp, EngineLost, EngineRestarted, EngineRestarting

INTERVAL_S = 1.0
MAX_KINDS = 200  # kinds with an entry of their own; all further ones share one


class Sampler:
    """Selects the first event of each kind in each interval, and counts the others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kinds: dict[Hashable, tuple[float, int]] = {}

    def take(self, kind: Hashable) -> int | None:
        """``None`` when the event is only counted; else the number of events counted since the last line."""
        now = self._clock()
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = None
        at, more = self._kinds.get(kind, (float("-inf"), 0))
        if now - at < INTERVAL_S:
            self._kinds[kind] = (at, more + 1)
            return None
        self._kinds[kind] = (now, 0)
        return more


@dataclass(frozen=True, slots=True)
class Line:
    """The log line of one type of event.

    ``fields`` are attributes, separated by blanks; ``name=attribute`` shows one under another name. With
    ``sampled_by`` (attributes, too), one line a second is logged for each combination of their values; its
    field ``more_since`` counts the events without a line.
    """

    event: type
    level: str | Callable[[Any], str]
    text: str
    fields: str = ""
    when: Callable[[Any], object] | None = None
    sampled_by: str = ""


def _level_of_attempt(event: AttemptFailed) -> str:
    """An operator must fix a misconfiguration; other failures matter only when they are frequent."""
    return "error" if POLICIES[event.kind].health is HealthEffect.MISCONFIGURED else "warning"


LINES = (
    Line(EdgeRecord, lambda it: "error" if it.failed else "info", "http request",
         "request_id trace_id tenant key_id method path status total_ms "
         "error_code error_param error_message"),
    Line(Admitted, "info", "request handed on beyond the memory forecast",
         "backend reason=beyond priority in_flight kv_usage",
         when=attrgetter("beyond"), sampled_by="backend beyond"),
    Line(RefusedEvent, "info", "request refused",
         "backend reason priority estimated_wait_ms=estimated_wait_s queue_depth in_flight kv_usage",
         sampled_by="backend reason"),
    # The request's own line shows that its caller disconnected.
    Line(AttemptFailed, _level_of_attempt, "attempt failed", "backend kind attempt delivered error_type",
         when=lambda it: it.kind is not FailureKind.CANCELLED_BY_CLIENT),
    Line(Resumed, "info", "answer resumed", "source target mode result tokens"),
    Line(LoadScaled, "warning", "load scaled", "backend factor"),
    Line(Degenerated, "warning", "degenerate answer", "backend sign action tokens"),
    Line(EngineLost, "error", "engine lost", "backend reason detail"),
    Line(EngineRestarting, "warning", "engine restarting", "backend reason detail exit_code attempt wait_s"),
    Line(EngineRestarted, "warning", "engine restarted", "backend attempt load_s away_s total_blocks"),
    Line(EngineGivenUp, "error",
         "engine given up: it is not started again; find out why it dies, then restart the gateway",
         "backend reason detail exit_code restarts_last_hour=restarts"),
    Line(AnswersLost, "error", "answers not stored", "count error_type",
         when=lambda it: it.reason == "defect"),
    Line(StoreBroke, "warning", "response cache not reached", "error_type"),
    Line(StoreIsBack, "info", "response cache reached again"),
    Line(LegSkipped, "info", "fallback target skipped at its limit", "leg reason", sampled_by="leg reason"),
    Line(AdapterLoaded, "info", "adapter loaded", "adapter=adapter_id load_s ahead"),
    Line(AdapterLoadFailed, "error", "adapter not loaded",
         "adapter=adapter_id reason=code detail retry_after_s"),
    Line(AdapterUnloaded, "info", "adapter unloaded", "adapter=adapter_id reason"),
    Line(RowsLost, "error", "usage rows lost", "count reason generation_ids"),
    Line(WriteFailed, "warning", "ledger write failed", "error_type failures depth"),
    Line(DatabaseIsBack, "info", "ledger written again", "failures"),
    Line(JournalFailed, "error", "ledger journal failed", "error_type rows"),
    Line(JournalIsBack, "info", "ledger journal written again"),
    Line(JournalRefused, "error", "usage row not journaled", "reason", sampled_by="reason"),
    Line(RowsReplayed, "info", "ledger journal read back", "rows=count adopted"),
    Line(RowsReplayed, "error", "ledger journal damaged, set aside", "damaged_bytes",
         when=lambda it: it.damaged_bytes > 0),
)  # fmt: skip


class EventDispatcher:
    """Passes each event to the listeners of its type, which may be attached later; the emitting parts get its
    :meth:`emit`.
    """

    def __init__(self) -> None:
        self._by_type: dict[type, list[tuple[Callable[[Any], object], Callable[[Any], object] | None]]] = {}
        self._metrics: Metrics | None = None
        self._log: Any = structlog.get_logger("sluice")

    def attach(
        self,
        listener: Callable[[Any], object],
        *types: type,
        when: Callable[[Any], object] | None = None,
    ) -> None:
        """Pass events of these types (those for which ``when`` holds) to ``listener``, in the order in which
        listeners were attached.
        """
        for one in types:
            self._by_type.setdefault(one, []).append((listener, when))

    def record(
        self,
        metrics: Metrics,
        *,
        log: Any = None,
        log_request: Callable[[RequestRecord], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Count events in ``metrics`` and log them from now on."""
        self._metrics = metrics
        if log is not None:
            self._log = log
        for event, updates in metrics.updates.items():
            for update in updates:
                self.attach(update, event)
        self.attach(log_request or partial(log_finished, logging.getLogger("sluice")), RequestRecord)
        sampler = Sampler(clock)
        for line in LINES:
            self.attach(partial(self._write, line, sampler), line.event, when=line.when)
        return self

    def emit(self, event: object) -> None:
        """Pass an event on. Never blocks and never raises, so that the emitter cannot fail because of it.

        A listener's error is counted in ``sluice_telemetry_errors_total`` and logged by its class; the other
        listeners still get the event.
        """
        for listener, when in self._by_type.get(type(event), ()):
            try:
                if when is None or when(event):
                    listener(event)
            except Exception as error:
                name = type(event).__name__
                if self._metrics is not None:
                    self._metrics.emit_error(name)
                self._log.error("event not recorded", kind=name, error_type=type(error).__name__)

    def _write(self, line: Line, sampler: Sampler, event: Any) -> None:
        fields: dict[str, Any] = {}
        if line.sampled_by:
            kind = (line.text, *(getattr(event, name) for name in line.sampled_by.split()))
            if (more := sampler.take(kind)) is None:
                return
            fields["more_since"] = more
        for field in line.fields.split():
            name, _, attribute = field.partition("=")
            value = _shown(name, getattr(event, attribute or name))
            if value is not None:
                fields[name] = value
        level = line.level if isinstance(line.level, str) else line.level(event)
        getattr(self._log, level)(line.text, **fields)


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return list(value)
    if name == "estimated_wait_ms":
        return round(value * 1000)
    return round(value, 3) if isinstance(value, float) else value
