"""Connects the metrics: what each part shows when scraped, and the events that are counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.registry import Collector

from gateway.admin.admission import AdmissionAdmin
from gateway.health.first_ready import FirstReady
from gateway.health.probe import HealthProbe
from gateway.routing.slo_targets import RevisionTargets
from gateway.wiring.access import attach_quota_metrics
from gateway.wiring.core import Core
from gateway.wiring.serving import ServingParts
from observability.canary_metrics import CanaryCollector
from observability.engine_metrics import EngineCollector
from observability.health_metrics import HealthCollector
from observability.metrics import Metrics
from observability.routing_metrics import RoutingCollector
from observability.shadow_metrics import ShadowCollector
from observability.state_metrics import StateCollector
from observability.subscribers import EventDispatcher
from observability.tracing_metrics import TraceCollector


def make_metrics(core: Core, serving: ServingParts, admission: AdmissionAdmin) -> Metrics:
    """Build the metrics over all parts, and attach them to the event bus."""
    base, fleet = core.base, core.backends.fleet
    metrics = Metrics(
        version=base.version,
        known_routes=core.control.routing.file_routes,
        known_backends=fleet.backends,
        known_prompt_versions=core.model.versions.ids,
    )
    read_figures(metrics, core, serving, admission)
    for collector in collectors(core, serving):
        metrics.registry.register(collector)
    attach_quota_metrics(core.access, base.events, metrics.registry)
    base.events.attach(EventDispatcher(metrics).emit)
    return metrics


def read_figures(metrics: Metrics, core: Core, serving: ServingParts, admission: AdmissionAdmin) -> None:
    """Connect the figures that a scrape reads from the parts."""
    host, routing, ledger = core.backends.engines.host, core.control.routing.projection, core.accounts.ledger
    if host is not None:
        metrics.supervision.read(lambda: host.standing().standing)
    metrics.adapters.read(core.adapters.figures)
    metrics.admission.read(admission.figures)
    metrics.answers.read(core.generation.answers.figures)
    metrics.answers.read_legs(core.generation.target_limits.figures)
    metrics.ledger.read(lambda: ledger.lag_s, lambda: ledger.journal_bytes, lambda: ledger.journal_working)
    metrics.resilience.read_budget(core.generation.retries_left)
    metrics.slo.read(RevisionTargets(core.control.revision))
    metrics.read_in_flight(lambda: serving.in_flight.in_flight)
    metrics.read_outbox_rows(lambda: ledger.depth)
    metrics.read_routing_revision(lambda: routing.number)


def collectors(core: Core, serving: ServingParts) -> Iterator[Collector]:
    """What the parts show beyond the gateway's own counters."""
    base, host, routing = core.base, core.backends.engines.host, core.control.routing.projection
    yield from core.backends.collectors()
    if host is not None:
        yield EngineCollector(host.figures)
    yield RoutingCollector(lambda: (routing.head, routing.behind is not None))
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
