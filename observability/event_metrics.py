"""Metrics that count events: one table of families, and how each event changes them.

Events of every request are counted by special code, because their cost matters
(:mod:`observability.metrics`, :mod:`observability.admission_metrics`); the events here are rarer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from accounting.events import (
    JournalFailed,
    JournalRefusal,
    JournalRefused,
    LimitStoreAnswered,
    LimitStoreMissed,
    LoginFailed,
    QuotaDecided,
    QuotaSettled,
    RowsLost,
    RowsReplayed,
    RowsWritten,
    SettlementsLost,
    WriteFailed,
)
from adapters.events import (
    AdapterAsked,
    AdapterLoaded,
    AdapterLoadFailed,
    AdapterReplacedByBase,
    AdapterUnloaded,
)
from observability.histogram import Histogram
from observability.labels import Bounded, Series
from resilience.events import (
    AttemptFailed,
    Degenerated,
    LoadScaled,
    Recovered,
    Resumed,
    Retried,
    RetryRefused,
)
from resilience.failures import FailureKind
from resilience.leg_limits import LegSkipped
from resilience.response_cache_values import AnswersLost, LookedUp
from resilience.supervisor import EngineRestarted, EngineRestarting, Loss

E = TypeVar("E")
Update = Callable[[Any], None]

# Seconds. The demo adapters load in about ten milliseconds; a large one on a slow disk takes seconds.
LOAD_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# A store on the same network answers within the first two steps; after the last the gateway decides alone.
ANSWER_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
# From the loss of an engine until it takes work again: seconds for the embedded engine, half a minute for
# vLLM, minutes for a large model.
RESTART_BUCKETS = (0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0)

OOM_LAYERS = ("containment", "recovery")
QUOTA_OUTCOMES = (
    ("request", "allowed"), ("request", "requests_per_minute"),
    ("tokens", "allowed"), ("tokens", "tokens_per_minute"), ("tokens", "tokens_per_day"),
    ("money", "allowed"), ("money", "usd_per_day"), ("money", "usd_per_month"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class On(Generic[E]):
    """How one type of event changes a family: by ``amount``, in the series ``labels``, if ``when`` holds."""

    event: type[E]
    labels: Callable[[E], tuple[str | None, ...]] = lambda event: ()
    amount: Callable[[E], float] = lambda event: 1
    when: Callable[[E], bool] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One counter, gauge (``set`` by the event) or histogram (with ``buckets``), and the events that change
    it. The series ``start`` are shown at 0 from the start, so that ``increase()`` sees their first event.
    """

    name: str
    text: str
    on: Sequence[On[Any]]
    labels: tuple[str, ...] = ()
    start: Iterable[tuple[str, ...]] = ()
    buckets: tuple[float, ...] = ()
    gauge: bool = False


FAMILIES: tuple[Family, ...] = (
    # Attempts on backends.
    Family(
        "sluice_backend_failures_total", "Failed attempts, by kind of failure.",
        [On(AttemptFailed, lambda event: (event.backend, event.kind.value))], ("backend", "kind"),
    ),
    Family("sluice_retries_total", "Attempts repeated on the same backend.", [On(Retried)]),
    Family(
        "sluice_retries_refused_total", "Retries that the retry budget refused.",
        [On(RetryRefused, lambda event: (event.backend,))], ("backend",),
    ),
    Family(
        "sluice_recovered_total", "Attempts that succeeded after a failed one.",
        [On(Recovered, lambda event: (event.backend, event.kind.value))], ("backend", "kind"),
    ),
    Family(
        "sluice_oom_contained_total",
        "Out of memory: answered by a retry (containment), load lowered (recovery).",
        [
            On(Recovered, lambda event: (event.backend, "containment"),
               when=lambda event: event.kind is FailureKind.CUDA_OOM),
            On(LoadScaled, lambda event: (event.backend, "recovery"), when=lambda event: event.shrunk),
        ],
        ("backend", "layer"),
    ),
    Family(
        "sluice_admitted_load_factor",
        "Share of its usual load that a backend is given; below 1 after it ran out of memory.",
        [On(LoadScaled, lambda event: (event.backend,), lambda event: event.factor)], ("backend",),
        gauge=True,
    ),
    Family(
        "sluice_degenerate_answers_total",
        "Answers that became endless repetition or replacement characters, and the reaction.",
        [On(Degenerated, lambda event: (event.backend, event.sign.value, event.action))],
        ("backend", "sign", "action"),
    ),
    Family(
        "sluice_resumed_streams_total", "Calls that resumed a partial answer, and their result.",
        [On(Resumed, lambda event: (event.source, event.target, event.mode, event.result))],
        ("from", "to", "mode", "result"),
    ),
    # The engine in process.
    Family(
        "sluice_engine_restarts_total", "Restarts of an engine in process, by the reason of the loss.",
        [On(EngineRestarting, lambda event: (event.backend, event.reason.value))], ("backend", "reason"),
    ),
    Family(
        "sluice_engine_restart_seconds", "From the engine's loss until it accepted requests again.",
        [On(EngineRestarted, amount=lambda event: event.away_s)], buckets=RESTART_BUCKETS,
    ),
    # The response cache and the limits on fallback targets.
    Family(
        "sluice_response_cache_lookups_total",
        "Lookups in the response cache: exact, similar, miss, no_vector, error.",
        [On(LookedUp, lambda event: (event.kind.value,))], ("kind",),
    ),
    Family(
        "sluice_response_cache_lost_total", "Answers that were not stored.",
        [On(AnswersLost, lambda event: (event.reason,), lambda event: event.count)], ("reason",),
    ),
    Family(
        "sluice_fallback_leg_skipped_total",
        "Fallback targets skipped because they were at their limit: concurrency, spend.",
        [On(LegSkipped, lambda event: (event.leg, event.reason))], ("leg", "reason"),
    ),
    # Adapters of the engine in process.
    Family(
        "sluice_adapter_requests_total",
        "Requests for an adapter of the engine in process, by whether it was loaded already.",
        [On(AdapterAsked, lambda event: (event.adapter_id, "yes" if event.resident else "no"))],
        ("adapter", "resident"),
    ),
    Family(
        "sluice_adapter_loads_total",
        "Loads of adapters: on a request, ahead of one, or failed, by the reason.",
        [
            On(AdapterLoaded, lambda event: ("ahead" if event.ahead else "on_request",)),
            On(AdapterLoadFailed, lambda event: (event.code,)),
        ],
        ("result",),
    ),
    Family(
        "sluice_adapter_load_seconds", "Time to load an adapter into the engine.",
        [On(AdapterLoaded, amount=lambda event: event.load_s)], buckets=LOAD_BUCKETS,
    ),
    Family(
        "sluice_adapter_unloads_total", "Adapters unloaded: for room, or retired.",
        [On(AdapterUnloaded, lambda event: (event.reason,))], ("reason",),
    ),
    Family(
        "sluice_adapter_replaced_by_base_total",
        "Answers of the base model in place of an adapter that could not be used.",
        [On(AdapterReplacedByBase, lambda event: (event.adapter_id,))], ("adapter",),
    ),
    # The ledger.
    Family(
        "sluice_ledger_rows_total", "Usage rows by result.",
        [
            On(RowsWritten, lambda event: ("written",), lambda event: event.count),
            On(RowsLost, lambda event: ("lost",), lambda event: event.count),
        ],
        ("result",), start=(("written",), ("lost",)),
    ),
    Family(
        "sluice_ledger_write_failures_total", "Batches of usage rows whose write failed and is retried.",
        [On(WriteFailed)],
    ),
    Family(
        "sluice_ledger_journal_failures_total", "Groups of usage rows that the disk failed to write.",
        [On(JournalFailed)],
    ),
    Family(
        "sluice_ledger_journal_refused_total", "Usage rows that were not journaled and are only in memory.",
        [On(JournalRefused, lambda event: (event.reason.value,))], ("reason",),
        start=[(reason.value,) for reason in JournalRefusal],
    ),
    Family(
        "sluice_ledger_rows_lost_total", "Usage rows that will never be written.",
        [On(RowsLost, amount=lambda event: event.count)],
    ),
    Family(
        "sluice_ledger_rows_replayed_total",
        "Usage rows read back from journals, including rows that are already in the database.",
        [On(RowsReplayed, lambda event: ("adopted" if event.adopted else "own",), lambda event: event.count)],
        ("whose",), start=(("adopted",), ("own",)),
    ),
    Family(
        "sluice_ledger_journal_damaged_bytes_total",
        "Bytes of journals that could not be read; the files are set aside.",
        [On(RowsReplayed, amount=lambda event: event.damaged_bytes)],
    ),
    Family(
        "sluice_failed_logins_total",
        "Requests with a wrong key; throttled: after too many from the same address.",
        [On(LoginFailed, lambda event: ("throttled" if event.throttled else "refused",))],
        ("outcome",), start=(("refused",), ("throttled",)),
    ),
    # Keys' limits, by outcome and kind, never by key.
    Family(
        "sluice_quota_decisions_total",
        "Decisions on limited keys, by kind and by the limit that refused; counts=own: decided by "
        "this process alone.",
        [On(QuotaDecided, lambda event: (event.kind, event.refused_by or "allowed",
                                         "shared" if event.shared else "own"))],
        ("kind", "outcome", "counts"),
        start=[(*outcome, counts) for outcome in QUOTA_OUTCOMES for counts in ("shared", "own")],
    ),
    Family(
        "sluice_quota_tokens_total",
        "Tokens of ended requests of limited keys: held (reserved) and used.",
        [
            On(QuotaSettled, lambda event: ("held",), lambda event: event.held),
            On(QuotaSettled, lambda event: ("used",), lambda event: event.used),
        ],
        ("kind",), start=(("held",), ("used",)),
    ),
    Family(
        "sluice_quota_store_misses_total",
        "Times that the store of shared limits did not answer; the process then uses its own counts.",
        [On(LimitStoreMissed, lambda event: (event.reason,))], ("reason",),
        start=(("timeout",), ("unavailable",)),
    ),
    Family(
        "sluice_quota_settlements_lost_total", "Requests whose use is never reported to that store.",
        [On(SettlementsLost, amount=lambda event: event.count)],
    ),
    Family(
        "sluice_quota_store_seconds", "Response time of the store of shared limits.",
        [On(LimitStoreAnswered, amount=lambda event: event.took_s)], buckets=ANSWER_BUCKETS,
    ),
)  # fmt: skip
# Labels whose values are names of backends, with one common bound; other labels have few values, or only
# values from the code.
BACKEND_LABELS = frozenset({"backend", "leg", "from", "to"})


class EventMetrics:
    """The table's families in a registry; the series of ``known`` backends are shown from the start."""

    def __init__(self, registry: CollectorRegistry, backends: Bounded, known: Iterable[str] = ()) -> None:
        self._registry, self._backends = registry, backends
        self._series: dict[str, Series[Any]] = {}
        self.updates: dict[type, list[Update]] = {}
        for family in FAMILIES:
            self._add(family)
        for backend in known:
            self._series["sluice_admitted_load_factor"](backend).set(1.0)
            for layer in OOM_LAYERS:
                self._series["sluice_oom_contained_total"](backend, layer)

    def show_restarts(self, backend: str) -> None:
        """Show the restarts of a backend's engine in process at 0."""
        for reason in Loss:
            self._series["sluice_engine_restarts_total"](backend, reason.value)

    def _add(self, family: Family) -> None:
        series: Callable[..., Any]
        change: Callable[[Any, float], None]
        if family.buckets:
            histogram = Histogram(family.name, family.text, family.buckets, self._registry)
            series, change = lambda: histogram, Histogram.observe
        else:
            kind, change = (Gauge, Gauge.set) if family.gauge else (Counter, Counter.inc)
            metric: Any = kind(family.name, family.text, family.labels, registry=self._registry)
            bounds = (self._backends if label in BACKEND_LABELS else Bounded() for label in family.labels)
            series = self._series[family.name] = Series(metric, *bounds)
        for values in family.start:
            series(*values)
        for rule in family.on:
            self.updates.setdefault(rule.event, []).append(_update(series, change, rule))


def _update(series: Callable[..., Any], change: Callable[[Any, float], None], rule: On[Any]) -> Update:
    labels, amount, when = rule.labels, rule.amount, rule.when

    def update(event: Any) -> None:
        if when is None or when(event):
            change(series(*labels(event)), amount(event))

    return update
