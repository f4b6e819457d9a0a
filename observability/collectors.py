"""Metric families of other parts of the gateway; a scrape reads their figures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from observability.scrape import ScrapeCollector, Values, counter, gauge
from observability.trace_facts import TraceFigures
from resilience.leg_limits import LegFigures
from resilience.response_cache_values import CacheFigures
from resilience.supervisor import SupervisorState

NANOUSD = 1e9
# Families whose figures are the values of their series: kind, help and labels.
PLAIN = {
    "sluice_adapters": (gauge, "Registered versions of adapters.", ("state",)),
    # Lines that were completed, failed (in the error file), or returned (to wait again).
    "sluice_batch_lines": (counter, "Lines of batches that this process ran, by outcome.", ("outcome",)),
    "sluice_chaos_faults": (counter, "Injected faults.", ("backend", "kind")),
    # How often the second worker answered first (won), did not (lost), or was not asked because the share of
    # extra requests was exhausted (refused).
    "sluice_hedged_requests": (
        counter, "Hedges of requests whose first token was late, by result.", ("backend", "result")
    ),
    "sluice_log_lines_dropped": (
        counter, "Log lines lost because they came faster than they could be written.", ()
    ),
    "sluice_retry_budget": (gauge, "Retries left for a backend now.", ("backend",)),
}  # fmt: skip


def plain(name: str, read: Callable[[], Values]) -> Collector:
    """The family ``name`` of :data:`PLAIN`, with the values of ``read`` at each scrape."""
    make, text, labels = PLAIN[name]
    return ScrapeCollector(lambda values: iter([make(name, text, values, *labels)]), read)


@dataclass(frozen=True, slots=True)
class CanaryFigures:
    """The last canary: its target share of the route, its judged requests, and by check the logarithm of the
    current step's e-value (``evidence``), which causes a rollback at ``bound``.
    """

    route: str
    backend: str
    phase: str
    percent: float
    requests: int
    evidence: Mapping[str, float]
    bound: float


def canary_families(figures: CanaryFigures | None) -> Iterator[Metric]:
    """The last canary; no family before the first one."""
    if figures is None:
        return
    yield gauge(
        "sluice_canary_percent",
        "The last canary's share of its route.",
        {(figures.route, figures.backend, figures.phase): figures.percent},
        "route", "backend", "phase",
    )  # fmt: skip
    yield gauge("sluice_canary_requests", "Requests of the last canary that were judged.", figures.requests)
    yield gauge(
        "sluice_canary_evidence_ratio",
        "Evidence of a check against the canary in this step, divided by the rollback bound; 1: rolled back.",
        {check: log / figures.bound for check, log in figures.evidence.items()},
        "check",
    )


def engine_state_families(figures: Mapping[str, SupervisorState]) -> Iterator[Metric]:
    yield gauge(
        "sluice_engine_state",
        "1 for the current state of an engine in process.",
        {(name, state.value): state is now for name, now in figures.items() for state in SupervisorState},
        "backend",
        "state",
    )


def health_families(figures: tuple[Mapping[str, bool], float | None]) -> Iterator[Metric]:
    """The checks of ``/ready``, and the seconds from the process' start until it was first ready.

    A dead engine shows here even while other backends answer.
    """
    checks, after_s = figures
    yield gauge("sluice_ready", "1 while /ready answers 200.", float(all(checks.values())))
    yield gauge("sluice_ready_check", "1 while a check of /ready passes.", checks, "check")
    yield gauge("sluice_ready_after_seconds", "From the process' start until it was first ready.", after_s)


def leg_families(figures: Mapping[str, LegFigures]) -> Iterator[Metric]:
    yield gauge(
        "sluice_fallback_leg_in_use",
        "Requests on a limited fallback target.",
        {name: leg.in_use for name, leg in figures.items()},
        "leg",
    )
    yield gauge(
        "sluice_fallback_leg_spend_usd",
        "Spent on a limited fallback target within the last minute, and reserved.",
        {name: (leg.spent_nanousd + leg.reserved_nanousd) / NANOUSD for name, leg in figures.items()},
        "leg",
    )


def quota_store_families(figures: tuple[bool, int]) -> Iterator[Metric]:
    """The shared store of keys' limits; ``figures``: (it is unreachable, number of waiting settlements)."""
    away, waiting = figures
    yield gauge("sluice_quota_store_up", "1 while the store of shared limits answers.", float(not away))
    yield gauge(
        "sluice_quota_settlements_waiting",
        "Ended requests not yet reported to the store of shared limits.",
        waiting,
    )


def response_cache_families(figures: CacheFigures | None) -> Iterator[Metric]:
    """The response cache of this process; no family without one."""
    if figures is not None:
        yield gauge("sluice_response_cache_entries", "Answers stored in this process.", figures.entries)
        yield gauge(
            "sluice_response_cache_bytes", "Estimated size of the stored answers in bytes.", figures.bytes
        )


def shadow_families(
    figures: tuple[Mapping[str, int], Mapping[str, int], Mapping[str, int]],
) -> Iterator[Metric]:
    """Sampled requests by result; pairs; exceptions of each check."""
    results, pairs, errors = figures
    yield counter("sluice_shadow_requests", "Requests in the shadow's sample, by result.", results, "result")
    yield counter("sluice_shadow_pairs", "Compared pairs: written, lost.", pairs, "result")
    yield counter("sluice_check_errors", "Exceptions of a check of answers, by check.", errors, "check")


def state_families(figures: tuple[bool, Mapping[str, tuple[int, str]]]) -> Iterator[Metric]:
    """Whether the state store is reachable, and for each of its streams the last record that this process
    uses, and the state: ``following``, ``away``, ``lost`` or ``refused``.
    """
    up, streams = figures
    yield gauge(
        "sluice_state_store_up",
        "1 while the state store is reached, and a SQLite file takes writes.",
        float(up),
    )
    yield gauge(
        "sluice_state_stream_number",
        "Last record in force in this process.",
        {name: number for name, (number, _) in streams.items()},
        "stream",
    )
    yield gauge(
        "sluice_state_stream_in_step",
        "0 when the store lost records that are in force here, holds one that cannot be applied, or was "
        "never reached.",
        {name: float(state == "following") for name, (_, state) in streams.items()},
        "stream",
    )


def trace_families(figures: TraceFigures) -> Iterator[Metric]:
    yield counter(
        "sluice_traces",
        "Traces by result.",
        {result: getattr(figures, result) for result in ("sent", "dropped", "failed", "left_out")},
        "result",
    )
    yield gauge("sluice_traces_waiting", "Traces waiting for the collector.", figures.waiting)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A remote worker; ``state`` is ``new``, ``in_service`` or ``ejected``.

    ``weight`` is its share of the load relative to a worker in full service, ``in_flight`` and
    ``connections`` are those of this process. ``running``, ``waiting`` (sequences) and ``kv_usage`` are its
    last report plus the requests sent since; ``None``: it reports none.
    """

    url: str
    state: str
    weight: float
    in_flight: int
    connections: int
    ejections: int
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


# Name, help and field.
WORKER_GAUGES = (
    ("sluice_worker_weight", "The worker's share of requests relative to one in full service.", "weight"),
    ("sluice_worker_in_flight", "Requests of this process in flight at the worker.", "in_flight"),
    ("sluice_worker_connections", "Connections to the worker.", "connections"),
    ("sluice_worker_running", "Sequences in the worker's batch, estimated.", "running"),
    ("sluice_worker_waiting", "Sequences in the worker's queue, estimated.", "waiting"),
    ("sluice_worker_kv_usage", "Share of the worker's KV blocks in use, estimated.", "kv_usage"),
)


def worker_families(figures: Mapping[str, Sequence[WorkerStatus]]) -> Iterator[Metric]:
    """The remote workers of every pool, by backend: one series a worker."""
    workers = {(name, one.url): one for name, pool in figures.items() for one in pool}
    yield gauge(
        "sluice_worker_in_service",
        "1 while the worker gets requests.",
        {key: worker.state == "in_service" for key, worker in workers.items()},
        "backend", "worker",
    )  # fmt: skip
    for name, text, field in WORKER_GAUGES:
        values = {key: getattr(worker, field) for key, worker in workers.items()}
        yield gauge(name, text, values, "backend", "worker")
    yield counter(
        "sluice_worker_ejections",
        "Times that the worker was taken out of service.",
        {key: worker.ejections for key, worker in workers.items()},
        "backend", "worker",
    )  # fmt: skip
