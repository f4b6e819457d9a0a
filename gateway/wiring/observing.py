"""Connects the metrics: what each part shows when scraped, and the events that are counted."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.registry import Collector

from gateway.admin.admission import AdmissionAdmin
from gateway.health.first_ready import FirstReady
from gateway.health.probe import HealthProbe
from gateway.routing.slo_targets import RevisionTargets
from gateway.wiring.core import Core
from gateway.wiring.serving import ServingParts
from observability.admission_metrics import GateCollector
from observability.collectors import (
    AdapterCollector,
    CanaryCollector,
    EngineStateCollector,
    HealthCollector,
    LegCollector,
    LogCollector,
    QuotaStoreCollector,
    ResponseCacheCollector,
    RetryBudgetCollector,
    RoutingCollector,
    ShadowCollector,
    StateCollector,
    TraceCollector,
)
from observability.engine_metrics import EngineCollector
from observability.metrics import Metrics
from observability.subscribers import EventDispatcher


def make_metrics(
    core: Core,
    serving: ServingParts,
    admission: AdmissionAdmin,
    dropped_log_lines: Callable[[], int] | None = None,
) -> Metrics:
    """Build the metrics over all parts, and attach them to the event bus."""
    base, fleet = core.base, core.backends.fleet
    metrics = Metrics(
        version=base.version,
        known_routes=core.control.routing.file_routes,
        known_backends=fleet.backends,
        known_prompt_versions=core.model.versions.ids,
    )
    read_figures(metrics, core, serving)
    for collector in collectors(core, serving, admission):
        metrics.registry.register(collector)
    if dropped_log_lines is not None:
        metrics.registry.register(LogCollector(dropped_log_lines))
    base.events.attach(EventDispatcher(metrics).emit)
    return metrics


def read_figures(metrics: Metrics, core: Core, serving: ServingParts) -> None:
    """Connect the figures that a scrape reads from the parts."""
    ledger, routing = core.accounts.ledger, core.control.routing.projection
    if core.backends.engines.host is not None:
        metrics.show_restarts()
    metrics.read(
        sluice_ledger_outbox_rows=lambda: ledger.depth,
        sluice_ledger_lag_seconds=lambda: ledger.lag_s,
        sluice_ledger_journal_bytes=lambda: ledger.journal_bytes,
        sluice_ledger_journal_up=lambda: ledger.journal_working,
        sluice_requests_in_flight=lambda: serving.in_flight.in_flight,
        sluice_routing_revision=lambda: routing.number,
    )
    metrics.slo.read(RevisionTargets(core.control.revision))


def collectors(core: Core, serving: ServingParts, admission: AdmissionAdmin) -> Iterator[Collector]:
    """What the parts show beyond the gateway's own counters."""
    base, host, routing = core.base, core.backends.engines.host, core.control.routing.projection
    yield from core.backends.collectors()
    if host is not None:
        yield EngineCollector(host.figures)
        yield EngineStateCollector(lambda: host.standing().standing)
    if core.access.shared is not None:
        yield QuotaStoreCollector(core.access.shared.status)
    yield AdapterCollector(core.adapters.figures)
    yield GateCollector(admission.figures)
    yield ResponseCacheCollector(core.generation.answers.figures)
    yield LegCollector(core.generation.target_limits.figures)
    yield RetryBudgetCollector(core.generation.retries_left)
    yield RoutingCollector(lambda: (routing.head, routing.unusable is not None))
    yield CanaryCollector(core.control.canary.figures)
    yield StateCollector(base.state.figures)
    yield TraceCollector(lambda: base.tracing.figures)
    yield ShadowCollector(serving.shadow.figures)
    yield health_collector(serving.health, serving.first_ready)


def health_collector(health: HealthProbe, first: FirstReady) -> HealthCollector:
    """Shows the checks of ``/ready``, and how long they took to pass."""

    def read() -> tuple[bool, Mapping[str, bool]]:
        checks = health.checks()
        return all(checks.values()), checks

    return HealthCollector(read, first.after_s)
