"""The composition root: the only place that knows concrete classes and constructs them."""

from __future__ import annotations

import importlib.metadata
import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from accounting.account import Accounts
from accounting.keys import KeyRing
from admission.controller import AdmissionController
from admission.events import AdmissionEvent
from budgeting.counting import ChatTokenizer
from gateway.admin.admission import AdmissionAdmin
from gateway.admin.chaos import ChaosAdmin
from gateway.admin.prompts import PromptAdmin
from gateway.admin.usage import UsageAdmin
from gateway.backends.fleet import Fleet
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings
from gateway.generation.dispatcher import Dispatcher
from gateway.generation.fallback import FallbackChain
from gateway.health.drain import Drain, DrainAdmin
from gateway.health.once_ready import OnceReady
from gateway.health.probe import HealthProbe
from gateway.health.rolling_stats import RollingStats
from gateway.http.respond import log_defect
from gateway.journey import Journey
from gateway.lora.model_cards import model_cards
from gateway.ports import HttpLimits, Services
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.model_text import ModelText
from gateway.prompts.prefixes import PrefixWatch
from gateway.prompts.published import Publishing
from gateway.prompts.versions import PromptVersions
from gateway.requests.edge_record import EdgeReporter
from gateway.requests.in_flight import InFlightRequests
from gateway.requests.request_record import Reporter
from gateway.routing.check import KnownNames
from gateway.routing.revision import rules_naming
from gateway.state.audit import Audit
from gateway.weights.source import prepare
from gateway.wiring.adapters import make_adapters
from gateway.wiring.backends import MakeEnginePool, make_engines
from gateway.wiring.cache import make_answers, make_leg_limits
from gateway.wiring.canary import make_canary
from gateway.wiring.chaos import chaos_collector, make_chaos
from gateway.wiring.hedging import hedge_collector
from gateway.wiring.keys import make_keys, usable
from gateway.wiring.ledger import leg_prices, make_engine_counts, make_ledger, make_prices
from gateway.wiring.limits import make_limiting
from gateway.wiring.metrics import Targets, first_ready, health_collector
from gateway.wiring.resilience import make_resilience
from gateway.wiring.routing import make_routing
from gateway.wiring.running import Gateway
from gateway.wiring.shadow import make_shadow
from gateway.wiring.state import make_state, published_store
from gateway.wiring.summaries import make_engine_summarizer
from gateway.wiring.tracing import make_tracing
from observability.events import RequestRecord
from observability.metrics import Metrics
from observability.state_metrics import StateCollector
from observability.subscribers import EventDispatcher
from observability.tracing_metrics import TraceCollector
from observability.workers import WorkerCollector
from resilience.supervisor_events import EngineRestarted, SupervisorEvent


def version() -> str:
    """The installed version."""
    return importlib.metadata.version("sluice-gateway")


def build(
    settings: Settings,
    *,
    admin_key: str | None,
    clock: Callable[[], float] = time.monotonic,
    unix_time: Callable[[], float] = time.time,
    observe: Callable[[RequestRecord], None] | None = None,
    engine_pool: MakeEnginePool | None = None,
) -> Gateway:
    """Construct a gateway.

    Args:
        settings: the configuration, valid in itself.
        admin_key: the bootstrap admin key (``SLUICE_ADMIN_KEY``).
        clock: monotonic seconds.
        unix_time: seconds since 1970.
        observe: is also told of each finished request (benchmarks).
        engine_pool: makes the backends of kind ``engine``, whose engines run elsewhere (Ray).

    Raises:
        ConfigError, RoutingFileError, RegistryFileError, PromptFileError, TokenizerError: something the
            configuration names cannot be used; the message is ready to print.
    """
    if settings.auth.enabled and not admin_key:
        raise ConfigError(
            "auth.enabled is true but there is no key: set SLUICE_ADMIN_KEY, or auth.enabled: false"
        )
    settings, weights = prepare(settings)
    tokenizer = ChatTokenizer.from_folder(settings.engine.tokenizer_folder)
    canonicalizer = Canonicalizer(native=settings.prompts.volatile, openai=settings.prompts.openai_volatile)
    text = ModelText(tokenizer, settings.engine.max_model_len, canonicalizer)
    vitals = RollingStats(clock)

    def stepped(preemptions: int) -> None:
        vitals.saw_preemptions(preemptions)
        if gate is not None:
            admission.wake(gate)

    def waiting(backend: str) -> int:
        return sum(admission.gate(backend).queue_counts().values())

    def supervised(event: SupervisorEvent) -> None:
        hub.emit(event)
        if isinstance(event, EngineRestarted):
            vitals.engine_restarted()

    state = make_state(settings.state, clock=clock, unix_time=unix_time)
    audit = Audit(state.store, unix_time=unix_time)
    ring = KeyRing(admin_key, enabled=settings.auth.enabled, unix_time=unix_time)
    keys = make_keys(ring, state, audit=audit, unix_time=unix_time)
    loras = make_adapters(
        settings,
        state,
        audit=audit,
        emit=lambda event: hub.emit(event),
        clock=clock,
        unix_time=unix_time,
        routed=lambda name: rules_naming(routing.book.current(), name),
        workers=lambda: engines.loras(),
        new_id=new_id,
    )
    adapters = loras.registry
    engines = make_engines(
        settings,
        token_bytes=tokenizer.token_bytes,
        clock=clock,
        on_step=stepped,
        emit=supervised,
        make_shelf=loras.rooms.make_shelf,
        bring=loras.bring,
        engine_pool=None if engine_pool is None else lambda name: engine_pool(name, lambda: waiting(name)),
    )
    # All backends on the engine share one gate; it is looked up at every step.
    gate = min(engines.on_engine, default=None)
    backends, chaos = make_chaos(settings.chaos, engines.backends)
    host, fleet = engines.host, Fleet(backends)
    versions = PromptVersions.from_folder(Path(settings.prompts.folder))
    summaries = make_engine_summarizer(
        text,
        tokenizer,
        versions=versions,
        backends=engines.backends,
        on_engine=engines.on_engine,
        new_id=new_id,
    )
    limits = settings.admission.limits()
    known = KnownNames(fleet.backends, versions.ids, adapters.servable, limits)
    routing = make_routing(Path(settings.routing.file), state, known=known, audit=audit, unix_time=unix_time)
    canary = make_canary(state, routing.book, audit, new_id=new_id, unix_time=unix_time)
    revision = routing.book.current
    metrics = Metrics(
        version=version(),
        known_routes=routing.file_routes,
        known_backends=fleet.backends,
        known_prompt_versions=versions.ids,
    )
    if host is not None:
        metrics.read_engine(host.figures)
        metrics.supervision.read(lambda: host.standing().standing)
    metrics.registry.register(WorkerCollector(engines.workers))
    metrics.registry.register(hedge_collector(engines.backends))
    if chaos is not None:
        metrics.registry.register(chaos_collector(chaos))
    metrics.adapters.read(loras.figures)
    metrics.read_routing_revision(lambda: routing.book.number)
    metrics.slo.read(Targets(revision))
    metrics.registry.register(routing.collector())
    metrics.registry.register(canary.collector())
    hub = EventDispatcher(metrics)
    limiting = make_limiting(
        settings.state, registry=metrics.registry, clock=clock, unix_time=unix_time, new_id=new_id
    )

    def finished(record: RequestRecord) -> None:
        vitals.saw(record)
        canary.tally.saw(record)
        hub.emit(record)
        if observe is not None:
            observe(record)

    reception = InFlightRequests()
    drain = Drain(reception, lame_duck_s=settings.server.lame_duck_seconds)
    metrics.read_in_flight(lambda: reception.in_flight)
    admission_desk = AdmissionAdmin(limits, revision=revision, clock=clock, unix_time=unix_time)

    def decided(event: AdmissionEvent) -> None:
        admission_desk.saw(event)
        hub.emit(event)

    admission = AdmissionController(
        limits,
        load=fleet.load,
        clock=clock,
        emit=decided,
        random=random.Random(),
        engine_of={} if gate is None else dict.fromkeys(engines.on_engine, gate),
    )
    admission_desk.watch(admission)
    metrics.read_admission(admission_desk.figures)
    resilience = make_resilience(
        settings.resilience,
        admission=admission,
        on_engine=engines.on_engine,
        restart_engine=None if host is None else host.request_restart,
        metrics=metrics.resilience,
        emit=hub.emit,
        clock=clock,
    )
    dispatcher = Dispatcher(resilience.guard, resilience.watch, tokenizer, hub.emit)
    answers = make_answers(settings, clock=clock, unix_time=unix_time, emit=hub.emit)
    metrics.answers.read(answers.figures)
    prices = make_prices(settings)
    leg_limits = make_leg_limits(
        settings, clock=clock, emit=hub.emit, price=leg_prices(settings, prices, unix_time=unix_time)
    )
    metrics.answers.read_legs(leg_limits.figures)
    ledger = make_ledger(settings, emit=hub.emit, clock=clock, unix_time=unix_time, new_id=new_id)
    metrics.read_outbox_rows(lambda: ledger.depth)
    metrics.ledger.read(lambda: ledger.lag_s, lambda: ledger.journal_bytes, lambda: ledger.journal_working)
    tracing = make_tracing(settings.tracing, version())
    metrics.registry.register(TraceCollector(lambda: tracing.figures))
    metrics.registry.register(StateCollector(state.figures))
    publishing = Publishing(versions, published_store(state), unix_time=unix_time)
    accounts = Accounts(ledger, prices.priced)
    shadows = make_shadow(
        settings,
        backends=fleet.backends,
        admission=admission,
        adapters=adapters,
        accounts=accounts,
        spelling=tokenizer,
        text=lambda: text.service,
        price=leg_prices(settings, prices, unix_time=unix_time),
        clock=clock,
        unix_time=unix_time,
        new_id=new_id,
    )
    metrics.registry.register(shadows.collector())
    journey = Journey(
        reception=reception,
        revision=revision,
        versions=versions,
        canonicalizer=canonicalizer,
        planner=lambda: text.planner,
        adapters=adapters,
        fleet=fleet,
        admission=admission,
        dispatcher=dispatcher,
        fallback=FallbackChain(
            answers=answers.cache,
            limits=leg_limits,
            admission=admission,
            dispatcher=dispatcher,
            backends=fleet.backends,
            clock=clock,
            on_engine=engines.on_engine,
            emit=hub.emit,
        ),
        accounts=accounts,
        shadow=shadows.shadow,
        limiter=limiting.limiter,
        reporter=Reporter(
            tracer=tracing,
            emit=finished,
            log_defect=lambda request_id, error: log_defect(error, request_id),
            clock=clock,
            prefixes=PrefixWatch(
                block_size=settings.engine.block_size, shared=settings.engine.share_prefix_across_tenants
            ),
        ),
        clock=clock,
        unix_time=unix_time,
        timeout_s=settings.server.request_timeout_seconds,
    )
    health = HealthProbe(
        fleet=fleet,
        reception=reception,
        vitals=vitals,
        text=lambda: text.service,
        model_loaded=lambda: (host is None or host.facts is not None) and loras.ready,
        engine=None if host is None else host.standing,
        engine_figures=(lambda: None) if host is None else host.figures,
        state_store_ok=lambda: state.ready,
        clock=clock,
        started_at=clock(),
    )
    first = first_ready(health, clock=clock, unix_time=unix_time)
    metrics.registry.register(health_collector(health, first))
    services = Services(
        journey=journey,
        keys=keys.door,
        limiter=limiting.limiter,
        health=OnceReady(health) if settings.server.ping == "once_ready" else health,
        idempotency=state.idempotency,
        text=lambda: text.service,
        prompts=PromptAdmin(
            registry=versions,
            publishing=publishing,
            canonicalizer=canonicalizer,
            planner=lambda: text.planner,
            text=lambda: text.service,
            revision=revision,
            fleet=fleet,
            adapter_ids=adapters.names,
            block_size=settings.engine.block_size,
        ),
        admission=admission_desk,
        models=lambda caller: usable(model_cards(fleet, adapters, text.max_model_len), caller, revision()),
        metrics=metrics.render,
        limits=HttpLimits(
            max_body_bytes=settings.server.max_body_bytes,
            max_messages=settings.server.max_messages,
            request_timeout_s=settings.server.request_timeout_seconds,
        ),
        clock=clock,
        unix_time=unix_time,
        new_id=new_id,
        version=version(),
        tell_edge=EdgeReporter(tracing, hub.emit, clock).tell,
        open_metrics=not settings.auth.metrics,
        chaos=None if chaos is None else ChaosAdmin(chaos, audit),
        usage=UsageAdmin(ledger.select),
        adapters=loras.desk,
        routing=routing.desk,
        canary=canary.desk,
        key_desk=keys.desk,
        shadow=shadows.desk,
        drain=DrainAdmin(drain, audit),
    )
    return Gateway(
        settings, services, reception, engines, ledger, state, tracing, text, fleet, routing, weights,
        publishing, answers, loras, canary, keys, limiting, shadows, first, drain, summaries,
        make_engine_counts(engines, ledger, observer=new_id("gw"), unix_time=unix_time),
    )  # fmt: skip


def new_id(prefix: str) -> str:
    """A fresh id: the prefix and 80 random bits."""
    return f"{prefix}_{secrets.token_hex(10)}"
