"""The gateway's metrics in one registry: those of finished requests here, of events in ``event_metrics.py``.

``docs/metrics.md`` lists every family with its labels and their bounds.
"""

from collections import Counter as Counted
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, ProcessCollector, generate_latest
from prometheus_client.metrics import disable_created_metrics

from accounting.events import JournalSynced
from admission.events import Admitted, FirstToken, RefusedEvent
from observability.admission_metrics import AdmissionMetrics
from observability.event_metrics import EventMetrics, Update
from observability.events import RequestRecord, ToolCallCounts
from observability.histogram import Histogram
from observability.labels import OTHER, Bounded, counted
from observability.prompt_metrics import PromptMetrics
from observability.scrape import ScrapeCollector
from observability.slo_metrics import NO_TARGETS, SloMetrics
from observability.usage_metrics import UsageMetrics

# Seconds. The targets of the gateway's own time are 1 and 2 ms, so the steps are dense around them.
OVERHEAD_BUCKETS = (
    0.0002, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
# The GenAI conventions' steps for the time to first token, with 0.15 and 0.3 around the target of 0.2 s
# and two more for long queues.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
# The conventions' steps for the time per token; three below 10 ms for small models.
TPOT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5,
)  # fmt: skip
# Doubling, with 1.4 s (the P99 target of the whole answer) as a step of its own.
TOTAL_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 300.0,
)  # fmt: skip
WAIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STAGE_BUCKETS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0,
)  # fmt: skip
# A sync takes 0.2 ms on a fast disk, 10 ms on a network disk; an answer waits for it 1 s at most.
SYNC_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)

# Name, help, buckets and field (in milliseconds) of the distributions over requests.
TIMES = (
    ("sluice_request_overhead_seconds", "The gateway's own time: neither queued nor in the backend.",
     OVERHEAD_BUCKETS, "overhead_ms"),
    ("sluice_ttft_seconds", "From arrival to the first token.", TTFT_BUCKETS, "ttft_ms"),
    ("sluice_time_per_output_token_seconds", "Mean time between two tokens of an answer.",
     TPOT_BUCKETS, "time_per_output_token_ms"),
    ("sluice_queue_wait_seconds", "Waiting time before the engine's first step.",
     WAIT_BUCKETS, "queue_wait_ms"),
    ("sluice_generation_seconds", "Time in the backend without its queue.", TOTAL_BUCKETS, "generation_ms"),
)  # fmt: skip
# Name, help and label of counters over requests; by the label's value the field that is added.
COUNTS = (
    ("sluice_tokens_total", "Tokens of answers, as the backend counted them.", "kind",
     {"input": "input_tokens", "output": "output_tokens", "cached": "cached_tokens"}),
    ("sluice_tool_calls_total", "Tool calls in answers, by outcome.", "outcome",
     {one: f"tool_calls.{one}" for one in ToolCallCounts.__struct_fields__}),
    ("sluice_budget_dropped_total", "Chunks and turns that the token budget left out.", "what",
     {"chunks": "dropped_chunks", "turns": "dropped_turns"}),
    ("sluice_budget_shortened_total",
     "Parts of prompts that the token budget shortened: chunks cut at a sentence's end, duplicates merged, "
     "turns summarized.", "what",
     {one: one for one in ("cut_chunks", "merged_chunks", "summarized_turns")}),
)  # fmt: skip
# Figures of other parts, with one series each; ``collectors.py`` has the others.
GAUGES = {
    "sluice_requests_in_flight": "Requests in progress.",
    "sluice_routing_revision": "The routing revision in force.",
    "sluice_routing_last_revision": "The state store's last revision.",
    "sluice_routing_behind": "1 while this process cannot use the last revision and serves the one before.",
    "sluice_adapters_resident": "Adapters loaded in the engine in process.",
    "sluice_adapter_places": "Most adapters that the engine in process can hold.",
    "sluice_batches_unfinished": "Unfinished batches in the database.",
    "sluice_batch_lines_running": "Lines of batches that run in this process.",
    "sluice_shadow_waiting": "Copies in the shadow's queue.",
    "sluice_shadow_waiting_bytes": "Bytes of the queued copies.",
    "sluice_shadow_active": "Copies in progress.",
    "sluice_shadow_spend_usd": "Spent on shadows within the last minute, and reserved.",
    "sluice_ledger_outbox_rows": "Usage rows waiting to be written.",
    "sluice_ledger_lag_seconds": "Age of the oldest usage row that is not in the database yet.",
    "sluice_ledger_journal_bytes": "Bytes of this process' journal files, and of those it took over.",
    "sluice_ledger_journal_up": "1 while usage rows are journaled, or no journal is configured.",
}
# Most requests that wait to be counted. Counting blocks the event loop: 64 take 0.5 ms, 256 would take 2 ms,
# which is no less a request. The other events of every request are counted with them, so that not many more
# of those wait.
MAX_UNCOUNTED = 64
_times_of = attrgetter(*(field for *_, field in TIMES))
_cuts_of = attrgetter("dropped_chunks", "dropped_turns", "cut_chunks", "summarized_turns")
TOKEN_KINDS = len(COUNTS[0][-1])
_tokens_of = attrgetter(*COUNTS[0][-1].values())
_others_of = attrgetter(*(field for *_, fields in COUNTS[1:] for field in fields.values()))  # mostly 0
# Events of every request, and what counts many of them together: it costs far less than a call each.
_Gathered = tuple[list[Any], Callable[[Sequence[Any]], None]]


class Metrics:
    """The gateway's metrics in a registry of their own; no method blocks. The ``known`` names always have
    label values of their own.
    """

    def __init__(
        self,
        *,
        version: str,
        known_routes: Iterable[str] = (),
        known_backends: Iterable[str] = (),
        known_prompt_versions: Iterable[str] = (),
    ) -> None:
        self.registry = registry = CollectorRegistry()
        # Finished requests that are not counted yet, and the targets of the revision that they ran under.
        self._finished: list[RequestRecord] = []
        self._revision: int | None = None
        self._targets = NO_TARGETS
        # It updates the metrics, so it must run before them.
        registry.register(ScrapeCollector(lambda _: iter(()), self._scraped))
        # No reader uses the ``_created`` samples, which double a scrape.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        known_backends = tuple(known_backends)
        routes, backends = Bounded(known_routes), Bounded(known_backends)

        counter = partial(counted, registry)
        ProcessCollector(registry=registry)
        Info("sluice_build", "The running version.", registry=registry).info({"version": version})
        self._requests = counter(
            "sluice_requests_total", "Requests, by HTTP status and error code.",
            route=routes, backend=backends, status=Bounded(), code=Bounded(),
        )  # fmt: skip
        self._versions = counter(
            "sluice_answers_total", "Whole answers, by the version of the weights.", backend_version=Bounded()
        )
        self._fallbacks = counter(
            "sluice_fallbacks_total",
            "Answers of the fallback chain, by fallback target and cause.",
            kind=Bounded(),
            reason=Bounded(),
        )
        self._trimmed = counter(
            "sluice_budget_trimmed_requests_total",
            "Requests whose prompt was trimmed by the token budget.",
        )()
        self._emit_errors = counter(
            "sluice_telemetry_errors_total", "Events that could not be recorded.", event=Bounded()
        )
        self._total = Histogram(
            "sluice_request_seconds", "From arrival to the end, of whole answers.", TOTAL_BUCKETS, registry
        )
        self._times = [Histogram(name, text, buckets, registry) for name, text, buckets, _ in TIMES]
        self._stages = Histogram(
            "sluice_stage_seconds", "Time in each stage of a request.", STAGE_BUCKETS, registry,
            label="stage", values=Bounded(cap=32),
        )  # fmt: skip
        self._counts: list[Counter] = []
        for name, text, label, kinds in COUNTS:
            self._counts += map(counter(name, text, **{label: Bounded()}), kinds)
        self._gauges = {name: Gauge(name, text, registry=registry) for name, text in GAUGES.items()}
        self._prompts = PromptMetrics(registry, Bounded(known_prompt_versions))
        self.slo = SloMetrics(registry, routes)
        self._usage = UsageMetrics(registry, routes, backends)
        self._sync_times = Histogram(
            "sluice_ledger_journal_sync_seconds", "Writing and syncing one group of usage rows.",
            SYNC_BUCKETS, registry,
        )  # fmt: skip
        self._journaled = counter("sluice_ledger_journal_rows_total", "Usage rows that were journaled.")()
        syncs: list[JournalSynced] = []
        admission = AdmissionMetrics(registry, backends)
        self._gathered: tuple[_Gathered, ...] = (
            (admission.admitted, admission.count_admitted),
            (admission.first_tokens, admission.count_first_tokens),
            (syncs, self._count_syncs),
        )
        events = EventMetrics(registry, backends, known_backends)
        self.show_restarts = events.show_restarts
        self.updates: Mapping[type, Sequence[Update]] = {
            RequestRecord: (self.request,),
            Admitted: (admission.admitted.append,),
            RefusedEvent: (admission.refused,),
            FirstToken: (admission.first_tokens.append,),
            JournalSynced: (syncs.append,),
            **events.updates,
        }

    def read(self, **figures: Callable[[], float]) -> None:
        """Set the functions that a scrape calls for :data:`GAUGES`, by name; none may block or raise."""
        for name, read in figures.items():
            self._gauges[name].set_function(read)

    def request(self, record: RequestRecord) -> None:
        """Take a finished request; it is counted later, with others, at the latest in the next scrape.

        A refused try of a batch's line is not counted: alerts on refusals and failures are for callers.
        """
        if record.batch_line and record.runs_again:
            return
        if record.revision != self._revision and record.revision is not None:
            self._count()
            self._revision, self._targets = record.revision, self.slo.targets()
        self._finished.append(record)
        if len(self._finished) >= MAX_UNCOUNTED:
            self._count()

    def _scraped(self) -> None:
        try:
            self._count()
        except Exception:  # a scrape must show the rest
            self.emit_error(RequestRecord.__name__)

    def _count(self) -> None:
        """Count the requests taken so far, in one pass per metric: a call per request would cost more."""
        for waiting, count_events in self._gathered:
            events = waiting[:]
            waiting.clear()
            if events:
                count_events(events)
        records, self._finished = self._finished, []
        if not records:
            return
        outcomes = Counted(
            [
                (
                    OTHER if record.error_code == "unknown_route" else record.route,
                    record.backend_name,
                    str(record.status),
                    record.error_code,
                )
                for record in records
            ]
        )
        for labels, count in outcomes.items():
            self._requests(*labels).inc(count)
        answered = [record for record in records if record.status < 400 and record.error_code is None]
        self._total.observe(*[record.total_ms / 1000 for record in answered])
        for version, count in Counted([record.backend_version for record in answered]).items():
            self._versions(version).inc(count)
        for histogram, values_ms in zip(self._times, zip(*map(_times_of, records), strict=True), strict=True):
            histogram.observe(*[value_ms / 1000 for value_ms in values_ms if value_ms is not None])
        tokens, others = self._counts[:TOKEN_KINDS], self._counts[TOKEN_KINDS:]
        for counter, counts in zip(tokens, zip(*map(_tokens_of, records), strict=True), strict=True):
            counter.inc(sum(counts))
        for record in records:
            if any(seldom := _others_of(record)):
                for counter, count in zip(others, seldom, strict=True):
                    counter.inc(count)
                self._trimmed.inc(any(_cuts_of(record)))
        for record in records:
            if record.fallback_kind is not None:
                self._fallbacks(record.fallback_kind, record.fallback_reason).inc()
        self._prompts.count(records)
        self.slo.count(records, self._targets)
        self._usage.count(records)
        stages: dict[str, list[float]] = {}
        for record in records:
            for stage, value_ms in record.stage_ms.items():
                stages.setdefault(stage, []).append(value_ms / 1000)
        for stage, values in stages.items():
            self._stages.of(stage).observe(*values)

    def _count_syncs(self, events: Sequence[JournalSynced]) -> None:
        self._sync_times.observe(*[event.took_s for event in events])
        self._journaled.inc(sum([event.rows for event in events]))

    def emit_error(self, event: str) -> None:
        self._emit_errors(event).inc()

    def render(self) -> bytes:
        """One scrape, in Prometheus' text format."""
        return generate_latest(self.registry)
