"""Connects the metrics to the figures that a scrape reads and to the events that are counted."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.registry import Collector

from gateway.admin.admission import AdmissionAdmin
from gateway.health.first_ready import FirstReady
from gateway.health.probe import HealthProbe
from gateway.wiring.core import Core
from gateway.wiring.serving import ServingParts
from observability.admission_metrics import gate_families
from observability.collectors import (
    canary_families,
    engine_state_families,
    health_families,
    leg_families,
    plain,
    quota_store_families,
    response_cache_families,
    shadow_families,
    state_families,
    trace_families,
)
from observability.engine_metrics import engine_families
from observability.metrics import Metrics
from observability.scrape import ScrapeCollector


def make_metrics(
    core: Core,
    serving: ServingParts,
    admission: AdmissionAdmin,
    dropped_log_lines: Callable[[], int] | None = None,
) -> Metrics:
    base, fleet, ledger, routing = core.base, core.backends.fleet, core.accounts.ledger, core.control.routing
    metrics = Metrics(
        version=base.version,
        known_routes=tuple(routing.seed.config["routes"]) if routing.seed.config is not None else (),
        known_backends=tuple(fleet.backends),
        known_prompt_versions=core.model.versions.ids,
    )
    loader, runner, shadow = core.adapters.loader, serving.batches.runner, serving.shadow
    for engine in core.backends.engines.in_process:
        metrics.show_restarts(engine.gate)
    metrics.read(
        sluice_ledger_outbox_rows=lambda: ledger.depth,
        sluice_ledger_lag_seconds=lambda: ledger.lag_s,
        sluice_ledger_journal_bytes=lambda: ledger.journal_bytes,
        sluice_ledger_journal_up=lambda: ledger.journal_working,
        sluice_requests_in_flight=lambda: serving.in_flight.in_flight,
        sluice_routing_revision=lambda: routing.number,
        sluice_routing_last_revision=lambda: routing.head,
        sluice_routing_behind=lambda: routing.unusable is not None,
        sluice_adapters_resident=lambda: len(loader.resident),
        sluice_adapter_places=lambda: loader.places,
        sluice_batches_unfinished=lambda: len(runner.batches),
        sluice_batch_lines_running=lambda: len(runner.running),
        sluice_shadow_waiting=lambda: len(shadow.queue),
        sluice_shadow_waiting_bytes=lambda: shadow.queue.size_bytes,
        sluice_shadow_active=lambda: shadow.active,
        sluice_shadow_spend_usd=serving.shadow.spend_usd,
    )
    metrics.slo.targets = lambda: core.control.revision().targets
    for collector in collectors(core, serving, admission):
        metrics.registry.register(collector)
    if dropped_log_lines is not None:
        metrics.registry.register(plain("sluice_log_lines_dropped", dropped_log_lines))
    base.events.record(metrics)
    return metrics


def collectors(core: Core, serving: ServingParts, admission: AdmissionAdmin) -> Iterator[Collector]:
    """Yield the collectors of the parts' figures, in addition to the gateway's own counters."""
    base, engines = core.base, core.backends.engines
    yield from core.backends.collectors()
    if engines.in_process:
        yield ScrapeCollector(engine_families, engines.figures)
        yield ScrapeCollector(engine_state_families, engines.states)
    if core.access.shared is not None:
        yield ScrapeCollector(quota_store_families, core.access.shared.status)
    yield plain("sluice_adapters", core.adapters.states)
    yield ScrapeCollector(gate_families, admission.figures)
    yield ScrapeCollector(response_cache_families, core.generation.answers.figures)
    yield plain("sluice_batch_lines", lambda: serving.batches.runner.outcomes)
    yield ScrapeCollector(leg_families, core.generation.fallback.limits.figures)
    yield plain("sluice_retry_budget", core.generation.retries_left)
    yield ScrapeCollector(canary_families, core.control.canary_figures)
    yield ScrapeCollector(state_families, base.state.figures)
    yield ScrapeCollector(trace_families, lambda: base.tracing.figures)
    shadow, errors = serving.shadow, serving.shadow.comparer.checks.errors
    yield ScrapeCollector(shadow_families, lambda: (shadow.outcomes, shadow.pairs_made, errors))
    yield health_collector(serving.health, serving.first_ready)


def health_collector(
    health: HealthProbe, first: FirstReady
) -> ScrapeCollector[tuple[Mapping[str, bool], float | None]]:
    return ScrapeCollector(health_families, lambda: (health.checks(), first.after_s()))
