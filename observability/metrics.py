"""The gateway's metrics, in one registry: those of finished requests here, the others in ``*_metrics.py``.

Every family with its labels and their bounds stands in ``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from observability.adapter_metrics import AdapterMetrics
from observability.admission_metrics import AdmissionMetrics, GateFigures
from observability.cache_metrics import CacheMetrics
from observability.engine_metrics import EngineCollector
from observability.events import EngineFigures, RequestRecord
from observability.histogram import Histogram
from observability.labels import OTHER, Bounded, Series
from observability.ledger_metrics import LedgerMetrics
from observability.prompt_metrics import PromptMetrics
from observability.resilience_metrics import ResilienceMetrics
from observability.resume_metrics import ResumeMetrics
from observability.slo_metrics import SloMetrics
from observability.supervisor_metrics import SupervisorMetrics
from observability.usage_metrics import UsageMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds. The gateway's own time: the bars are 1 and 2 ms, so the steps are dense around them.
OVERHEAD_BUCKETS = (
    0.0002, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
# The GenAI conventions' steps for the time to first token, with 0.15 and 0.3 around the default target of
# 0.2 s and two more for long queues.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
# The conventions' steps for the time per token; three below 10 ms for small models.
TPOT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5,
)  # fmt: skip
# Doubling, with 1.4 s (the default P99 target of the whole answer) as a step of its own.
TOTAL_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 300.0,
)  # fmt: skip
WAIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STAGE_BUCKETS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0,
)  # fmt: skip


class _WithoutCreated(Collector):
    """A registry without the ``_created`` samples, which nobody reads and which double a scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class Metrics:
    """The gateway's metrics in a registry of their own.

    Methods take what happened and count it; they do not block and hold no request.

    Args:
        version: shown by ``sluice_build_info``.
        known_routes: route names that always keep a label of their own.
        known_backends: backend names that always keep one.
        known_prompt_versions: prompt versions that always keep one.
    """

    def __init__(
        self,
        *,
        version: str,
        known_routes: Iterable[str] = (),
        known_backends: Iterable[str] = (),
        known_prompt_versions: Iterable[str] = (),
    ) -> None:
        self.registry = CollectorRegistry()
        self._exposed = _WithoutCreated(self.registry)
        known_backends = tuple(known_backends)
        routes, backends = Bounded(known_routes), Bounded(known_backends)

        ProcessCollector(registry=self.registry)
        Info("sluice_build", "The running version.", registry=self.registry).info({"version": version})
        self._requests = Series(
            self._counter("sluice_requests_total", "Requests.", "route", "backend", "status", "code"),
            routes, backends, Bounded(), Bounded(),
        )  # fmt: skip
        self._versions = Series(
            self._counter(
                "sluice_answers_total", "Answers, by the weights that gave them.", "backend_version"
            ),
            Bounded(),
        )
        self._overhead = self._histogram(
            "sluice_request_overhead_seconds",
            "Time in the gateway that was not its backend's.",
            OVERHEAD_BUCKETS,
        )
        self._ttft = self._histogram("sluice_ttft_seconds", "From arrival to the first token.", TTFT_BUCKETS)
        self._tpot = self._histogram(
            "sluice_time_per_output_token_seconds", "Mean time between two tokens of an answer.", TPOT_BUCKETS
        )
        self._total = self._histogram(
            "sluice_request_seconds", "From arrival to the end, of whole answers.", TOTAL_BUCKETS
        )
        self._queue_wait = self._histogram(
            "sluice_queue_wait_seconds", "Waiting before the first step of the engine.", WAIT_BUCKETS
        )
        self._generation = self._histogram(
            "sluice_generation_seconds", "In the backend, its queue not included.", TOTAL_BUCKETS
        )
        tokens = self._counter("sluice_tokens_total", "Tokens of answers, as the backend counted.", "kind")
        self._tokens_in = tokens.labels("input")
        self._tokens_out = tokens.labels("output")
        self._tokens_cached = tokens.labels("cached")
        self.admission = AdmissionMetrics(self.registry, backends)
        self.supervision = SupervisorMetrics(self.registry)
        self._fallbacks = Series(
            self._counter("sluice_fallbacks_total", "Answers of the fallback chain.", "kind", "reason"),
            Bounded(), Bounded(),
        )  # fmt: skip
        self._in_flight = Gauge(
            "sluice_requests_in_flight", "Requests on their journey now.", registry=self.registry
        )
        self._ledger_rows = Series(
            self._counter("sluice_ledger_rows_total", "Usage rows by what became of them.", "result"),
            Bounded(),
        )
        self._ledger_failures = self._counter(
            "sluice_ledger_write_failures_total", "Batches of usage rows that must be tried again."
        )
        self._outbox = Gauge(
            "sluice_ledger_outbox_rows", "Usage rows waiting to be written.", registry=self.registry
        )
        for result in ("written", "lost"):
            self._ledger_rows(result)
        self.ledger = LedgerMetrics(self.registry)
        self.resilience = ResilienceMetrics(self.registry, backends, known_backends)
        self.resume = ResumeMetrics(self.registry, backends)
        self.answers = CacheMetrics(self.registry, backends)
        self.adapters = AdapterMetrics(self.registry)
        dropped = self._counter("sluice_budget_dropped_total", "What the token budget left out.", "what")
        self._dropped_chunks = dropped.labels("chunks")
        self._dropped_turns = dropped.labels("turns")
        shortened = self._counter(
            "sluice_budget_shortened_total",
            "What the token budget sent in another form: chunks up to a sentence's end, duplicates merged, "
            "turns as a summary.",
            "what",
        )
        self._cut_chunks = shortened.labels("cut_chunks")
        self._merged_chunks = shortened.labels("merged_chunks")
        self._summarized_turns = shortened.labels("summarized_turns")
        self._stages = Histogram(
            "sluice_stage_seconds", "Time in each stage of the journey.", STAGE_BUCKETS, self.registry,
            label="stage", values=Bounded(cap=32),
        )  # fmt: skip
        self._prompts = PromptMetrics(self.registry, Bounded(known_prompt_versions))
        self.slo = SloMetrics(self.registry, routes)
        self._usage = UsageMetrics(self.registry, routes, backends)
        self._revision = Gauge(
            "sluice_routing_revision", "The routing revision in force.", registry=self.registry
        )
        self._emit_errors = Series(
            self._counter("sluice_telemetry_errors_total", "Events that could not be recorded.", "event"),
            Bounded(),
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets, self.registry)

    # Figures that others hold and a scrape reads. The callables must neither block nor raise.

    def read_engine(self, read: Callable[[], EngineFigures | None]) -> None:
        """Show the engine in process under vLLM's names; call once."""
        self.registry.register(EngineCollector(read))

    def read_in_flight(self, read: Callable[[], int]) -> None:
        """Show how many requests are on their journey."""
        self._in_flight.set_function(read)

    def read_admission(self, read: Callable[[], Iterable[GateFigures]]) -> None:
        """Show how the gates of admission stand."""
        self.admission.read(read)

    def read_outbox_rows(self, read: Callable[[], int]) -> None:
        """Show how many usage rows wait."""
        self._outbox.set_function(read)

    def read_routing_revision(self, read: Callable[[], int]) -> None:
        """Show the routing revision in force."""
        self._revision.set_function(read)

    # What happened.

    def request(self, record: RequestRecord) -> None:
        """Count one finished request."""
        route = OTHER if record.error_code == "unknown_route" else record.route
        self._requests(route, record.backend_name, str(record.status), record.error_code).inc()
        if record.answered:
            self._total.observe(record.total_ms / 1000)
            self._versions(record.backend_version).inc()
        for histogram, value_ms in (
            (self._overhead, record.overhead_ms),
            (self._ttft, record.ttft_ms),
            (self._tpot, record.time_per_output_token_ms),
            (self._queue_wait, record.queue_wait_ms),
            (self._generation, record.generation_ms),
        ):
            if value_ms is not None:
                histogram.observe(value_ms / 1000)
        for counter, count in (
            (self._tokens_in, record.input_tokens),
            (self._tokens_out, record.output_tokens),
            (self._tokens_cached, record.cached_tokens),
            (self._dropped_chunks, record.dropped_chunks),
            (self._dropped_turns, record.dropped_turns),
            (self._cut_chunks, record.cut_chunks),
            (self._merged_chunks, record.merged_chunks),
            (self._summarized_turns, record.summarized_turns),
        ):
            if count:
                counter.inc(count)
        if record.fallback_kind is not None:
            self._fallbacks(record.fallback_kind, record.fallback_reason).inc()
        self._prompts.request(record)
        self.slo.request(record)
        self._usage.request(record)
        for stage, value_ms in record.stage_ms.items():
            self._stages.of(stage).observe(value_ms / 1000)

    def ledger_rows(self, result: str, rows: int) -> None:
        """Count usage rows that were ``written``, ``lost``…"""
        self._ledger_rows(result).inc(rows)

    def ledger_write_failed(self) -> None:
        """Count one batch that must be tried again."""
        self._ledger_failures.inc()

    def emit_error(self, event: str) -> None:
        """Count one event that a subscriber could not take."""
        self._emit_errors(event).inc()

    def render(self) -> bytes:
        """One scrape, in Prometheus' text format (:data:`CONTENT_TYPE`)."""
        return generate_latest(self._exposed)
