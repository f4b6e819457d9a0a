"""Every metric of the gateway: its name, its help, its labels, its buckets. Nothing else names a metric."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from observability.adapter_metrics import AdapterMetrics
from observability.admission_metrics import AdmissionMetrics, GateFigures
from observability.cache_metrics import CacheMetrics
from observability.events import EngineFigures, RequestRecord
from observability.histogram import Histogram
from observability.labels import OTHER, Bounded, Series
from observability.prompt_metrics import PromptMetrics
from observability.resilience_metrics import ResilienceMetrics
from observability.resume_metrics import ResumeMetrics
from observability.supervisor_metrics import SupervisorMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds. The gateway's own time: the bars are 1 and 2 ms, so the steps are dense around them.
OVERHEAD_BUCKETS = (
    0.0002, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
# The GenAI conventions' steps for the time to first token, with 0.15 and 0.3 around the target of 0.2 s
# (seed 000) and two more for long queues.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
# The conventions' steps for the time per token; three below 10 ms for small models.
TPOT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5,
)  # fmt: skip
# Doubling, with 1.4 s (the P99 target of the whole answer, seed 000) as a step of its own.
TOTAL_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.4,
    0.7,
    1.0,
    1.4,
    2.0,
    3.0,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    300.0,
)
WAIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STAGE_BUCKETS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0,
)  # fmt: skip


class EngineCollector(Collector):
    """The engine in process under vLLM's names, read when scraped, so that fleet routers find what they know.

    Args:
        read: the figures now, or ``None`` while there is no engine; must neither block nor raise.
        unix_time: seconds since 1970; the value of ``vllm:lora_requests_info``, of whose series readers take
            the newest.
    """

    def __init__(
        self, read: Callable[[], EngineFigures | None], unix_time: Callable[[], float] = time.time
    ) -> None:
        self._read = read
        self._unix_time = unix_time

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        figures = self._read()
        if figures is None:
            return
        labels, values = ["model_name", "engine"], [figures.model_name, "0"]
        gauges: tuple[tuple[str, str, float], ...] = (
            ("vllm:num_requests_running", "Sequences in the engine's batch.", figures.running),
            ("vllm:num_requests_waiting", "Sequences in the engine's queue.", figures.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", figures.kv_usage),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        counters: tuple[tuple[str, str, float], ...] = (
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                figures.prefix_queries,
            ),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", figures.prefix_hits),
            ("vllm:num_preemptions", "Sequences pushed out of the batch.", figures.preemptions),
        )
        if figures.prompt_tokens is not None:
            counters += (("vllm:prompt_tokens", "Prompt tokens computed or found.", figures.prompt_tokens),)
        if figures.generation_tokens is not None:
            counters += (("vllm:generation_tokens", "Tokens generated.", figures.generation_tokens),)
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=labels)
            counter.add_metric(values, value)
            yield counter
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache's shape.",
            labels=[*labels, "block_size", "num_gpu_blocks"],
        )
        info.add_metric([*values, str(figures.block_size), str(figures.total_blocks)], 1)
        yield info
        for kept in figures.distributions:
            histogram = HistogramMetricFamily(kept.name, kept.text, labels=labels)
            edges = [*map(floatToGoString, kept.bounds), "+Inf"]
            histogram.add_metric(
                values, list(zip(edges, map(float, accumulate(kept.counts)), strict=True)), kept.total
            )
            yield histogram
        if figures.loras is not None:
            loras = GaugeMetricFamily(
                "vllm:lora_requests_info",
                "Adapters of the requests; the value is the time of this reading.",
                labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            )
            names = [",".join(figures.loras.running), ",".join(figures.loras.waiting)]
            loras.add_metric([str(figures.loras.max_loras), *names], self._unix_time())
            yield loras


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
        routes, backends = Bounded(known_routes), Bounded(known_backends)

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
        self.resilience = ResilienceMetrics(self.registry, backends)
        self.resume = ResumeMetrics(self.registry, backends)
        self.answers = CacheMetrics(self.registry, backends)
        self.adapters = AdapterMetrics(self.registry)
        dropped = self._counter("sluice_budget_dropped_total", "What the token budget left out.", "what")
        self._dropped_chunks = dropped.labels("chunks")
        self._dropped_turns = dropped.labels("turns")
        self._stages = Histogram(
            "sluice_stage_seconds", "Time in each stage of the journey.", STAGE_BUCKETS, self.registry,
            label="stage", values=Bounded(cap=32),
        )  # fmt: skip
        self._prompts = PromptMetrics(self.registry, Bounded(known_prompt_versions))
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
        ):
            if count:
                counter.inc(count)
        if record.fallback_kind is not None:
            self._fallbacks(record.fallback_kind, record.fallback_reason).inc()
        self._prompts.request(record)
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
