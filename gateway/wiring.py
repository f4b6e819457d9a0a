"""The composition root: the only place that knows concrete classes and constructs them."""

from __future__ import annotations

import asyncio
import importlib.metadata
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from accounting.account import Accounts
from accounting.keys import KeyRing
from accounting.ledger import Ledger
from adapters.registry import AdapterRegistry
from admission.controller import AdmissionController
from admission.events import AdmissionEvent
from budgeting.counting import ChatTokenizer
from engine.errors import EngineStartError
from gateway.admission_desk import AdmissionDesk
from gateway.config import ConfigError, Settings
from gateway.dispatch import Dispatcher
from gateway.fallback import CachedAnswer, FallbackChain
from gateway.fleet import Fleet
from gateway.health import HealthProbe
from gateway.idempotency_store import SqliteIdempotencyStore
from gateway.journey import Journey
from gateway.keys import Keys
from gateway.model_text import ModelText
from gateway.ports import HttpLimits, ModelCard, Services
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.desk import PromptDesk
from gateway.prompts.engine_summary import EngineSummarizer
from gateway.prompts.prefixes import PrefixWatch
from gateway.prompts.published import Publishing, SqlitePublished
from gateway.prompts.versions import PromptVersions
from gateway.reception import Reception
from gateway.report import Reporter
from gateway.routing.revision import Known, Revision, load_routing
from gateway.vitals import Vitals
from gateway.weights.errors import FetchError
from gateway.weights.progress import LogProgress
from gateway.weights.source import Weights, prepare
from gateway.wiring_backends import Engines, make_engines
from gateway.wiring_summaries import make_engine_summarizer
from observability.events import RequestRecord
from observability.metrics import Metrics
from observability.subscribers import Hub
from observability.tracing import Tracing
from observability.workers import WorkerCollector
from resilience.guard import Guard
from resilience.response_cache import ResponseCache

# Longest wait for the last usage rows and spans when the gateway stops.
FLUSH_TIMEOUT_S = 5.0
# vLLM's core takes more than five seconds to leave by itself.
ENGINE_STOP_TIMEOUT_S = 15.0


def version() -> str:
    """The installed version."""
    return importlib.metadata.version("sluice-gateway")


@dataclass(frozen=True, slots=True)
class Gateway:
    """A whole gateway, built but not running; :meth:`running` starts its engine and its loops."""

    settings: Settings
    services: Services
    reception: Reception
    engines: Engines
    ledger: Ledger
    state: SqliteIdempotencyStore
    tracing: Tracing
    text: ModelText
    fleet: Fleet
    revision: Revision
    weights: Weights
    publishing: Publishing
    summaries: EngineSummarizer | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine, the ledger's writer and the state store while the block runs.

        The engine loads in the background: the gateway is alive before it is ready.

        Raises:
            PromptChanged: a published prompt version has another text now.
            ExceptionGroup: holding the EngineStartError when the engine cannot start and nothing else
                could answer.
        """
        await self.ledger.open()
        await self.state.open()
        try:
            await asyncio.to_thread(self.publishing.publish)
            async with asyncio.TaskGroup() as loops:
                writer = loops.create_task(self.ledger.run(), name="ledger")
                residents = [
                    loops.create_task(resident.run(), name=name)
                    for name, resident in self.engines.residents.items()
                ]
                if self.summaries is not None:
                    residents.append(loops.create_task(self.summaries.run(), name="summaries"))
                starter = loops.create_task(self._start_engine(), name="engine-start")
                try:
                    yield
                finally:
                    for task in (starter, *residents):
                        task.cancel()
                    if self.engines.host is not None:
                        await self.engines.host.stop(ENGINE_STOP_TIMEOUT_S)
                    await self.ledger.close(FLUSH_TIMEOUT_S)
                    writer.cancel()
        finally:
            await self.state.close()
            await asyncio.to_thread(self.tracing.shutdown, FLUSH_TIMEOUT_S)

    async def _start_engine(self) -> None:
        host, log = self.engines.host, structlog.get_logger("gateway")
        if host is None:
            return
        try:
            if self.weights.remote:
                await self.weights.fetch(LogProgress(self.weights.source, self.services.clock))
            async with asyncio.timeout(self.settings.engine.start_timeout_seconds):
                facts = await host.start()
        except (EngineStartError, FetchError, TimeoutError) as error:
            if not self.engines.beside_the_engine:
                raise
            # The other backends go on; `/ready` and `/health/deep` tell of the one that is missing.
            log.error("engine not started", reason=str(error) or "engine.start_timeout_seconds have passed")
            await host.stop(ENGINE_STOP_TIMEOUT_S)
            return
        self.text.limit(min(self.text.max_model_len, facts.max_model_len))
        log.info(
            "engine ready",
            model=self.settings.engine.model_id,
            max_model_len=self.text.max_model_len,
            total_blocks=facts.total_blocks,
            **facts.details,
        )


def build(
    settings: Settings,
    *,
    admin_key: str | None,
    clock: Callable[[], float] = time.monotonic,
    unix_time: Callable[[], float] = time.time,
    observe: Callable[[RequestRecord], None] | None = None,
) -> Gateway:
    """Construct a gateway.

    Args:
        settings: the configuration, valid in itself.
        admin_key: the bootstrap admin key (``SLUICE_ADMIN_KEY``).
        clock: monotonic seconds.
        unix_time: seconds since 1970.
        observe: is also told of each finished request (benchmarks).

    Raises:
        ConfigError, RoutingFileError, RegistryFileError, PromptFileError, TokenizerError: something the
            configuration names cannot be used; the message is ready to print.
    """
    if settings.auth.enabled and not admin_key:
        raise ConfigError(
            "auth.enabled is true but there is no key: set SLUICE_ADMIN_KEY, or auth.enabled: false"
        )
    log = structlog.get_logger("gateway")
    settings, weights = prepare(settings)
    tokenizer = ChatTokenizer.from_folder(settings.engine.tokenizer_folder)
    canonicalizer = Canonicalizer(native=settings.prompts.volatile, openai=settings.prompts.openai_volatile)
    text = ModelText(tokenizer, settings.engine.max_model_len, canonicalizer)
    vitals = Vitals(clock)

    def stepped(preemptions: int) -> None:
        vitals.saw_preemptions(preemptions)
        if gate is not None:
            admission.wake(gate)

    engines = make_engines(
        settings,
        token_bytes=tokenizer.token_bytes,
        clock=clock,
        on_step=stepped,
        on_death=lambda error: log.error("engine died", reason=str(error)),
    )
    # All backends on the engine share one gate; it is looked up at every step.
    gate = min(engines.on_engine, default=None)
    host, fleet = engines.host, Fleet(engines.backends)
    versions = PromptVersions.from_folder(Path(settings.prompts.folder))
    adapters = (
        AdapterRegistry.from_file(Path(settings.adapters.file), base_model=settings.engine.model_id)
        if settings.adapters.file
        else AdapterRegistry(())
    )
    summaries = make_engine_summarizer(
        text,
        tokenizer,
        versions=versions,
        backends=engines.backends,
        on_engine=engines.on_engine,
        new_id=new_id,
    )
    limits = settings.admission.limits()
    known = Known(fleet.backends, versions.ids, adapters.ids, limits)
    revision = load_routing(Path(settings.routing.file), known)
    metrics = Metrics(
        version=version(),
        known_routes=revision.routes,
        known_backends=fleet.backends,
        known_prompt_versions=versions.ids,
    )
    if host is not None:
        metrics.read_engine(host.figures)
    metrics.registry.register(WorkerCollector(engines.workers))
    metrics.read_routing_revision(lambda: revision.number)
    hub = Hub(metrics)

    def finished(record: RequestRecord) -> None:
        vitals.saw(record)
        hub.emit(record)
        if observe is not None:
            observe(record)

    reception = Reception()
    metrics.read_in_flight(lambda: reception.in_flight)
    admission_desk = AdmissionDesk(limits, revision=lambda: revision, clock=clock, unix_time=unix_time)

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
    dispatcher = Dispatcher(Guard(clock=clock, sleep=asyncio.sleep, random=random.Random(), emit=hub.emit))
    cache: ResponseCache[CachedAnswer] = ResponseCache(
        settings.response_cache.capacity, settings.response_cache.ttl_seconds, clock
    )
    ledger = Ledger(
        settings.ledger.url,
        emit=hub.emit,
        clock=clock,
        unix_time=unix_time,
        outbox_rows=settings.ledger.outbox_rows,
    )
    metrics.read_outbox_rows(lambda: ledger.depth)
    tracing = Tracing(settings.tracing.otlp_endpoint, version())
    state = SqliteIdempotencyStore(settings.state.url, unix_time=unix_time)
    publishing = Publishing(versions, SqlitePublished(settings.state.url), unix_time=unix_time)
    journey = Journey(
        reception=reception,
        revision=lambda: revision,
        versions=versions,
        canonicalizer=canonicalizer,
        planner=lambda: text.planner,
        adapters=adapters,
        fleet=fleet,
        admission=admission,
        dispatcher=dispatcher,
        fallback=FallbackChain(
            cache=cache, admission=admission, dispatcher=dispatcher, backends=fleet.backends
        ),
        accounts=Accounts(ledger),
        reporter=Reporter(
            tracer=tracing,
            emit=finished,
            log_defect=lambda request_id, error: log.error(
                "internal error", request_id=request_id, exc_info=error
            ),
            clock=clock,
            prefixes=PrefixWatch(
                block_size=settings.engine.block_size, shared=settings.engine.share_prefix_across_tenants
            ),
        ),
        clock=clock,
        unix_time=unix_time,
    )
    health = HealthProbe(
        fleet=fleet,
        reception=reception,
        vitals=vitals,
        text=lambda: text.service,
        model_loaded=lambda: host is None or host.facts is not None,
        state_store_ok=lambda: state.healthy,
        clock=clock,
        started_at=clock(),
    )
    services = Services(
        journey=journey,
        keys=Keys(KeyRing(admin_key, enabled=settings.auth.enabled)),
        health=health,
        idempotency=state,
        text=lambda: text.service,
        prompts=PromptDesk(
            registry=versions,
            publishing=publishing,
            canonicalizer=canonicalizer,
            planner=lambda: text.planner,
            text=lambda: text.service,
            revision=lambda: revision,
            fleet=fleet,
            adapter_ids=adapters.ids,
            block_size=settings.engine.block_size,
        ),
        admission=admission_desk,
        models=lambda: _models(fleet, adapters, text.max_model_len),
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
    )
    return Gateway(
        settings, services, reception, engines, ledger, state, tracing, text, fleet, revision, weights,
        publishing, summaries,
    )  # fmt: skip


def new_id(prefix: str) -> str:
    """A fresh id: the prefix and 80 random bits."""
    return f"{prefix}_{secrets.token_hex(10)}"


def _models(fleet: Fleet, adapters: AdapterRegistry, max_model_len: int) -> Sequence[ModelCard]:
    cards = [ModelCard(model, model, None, max_model_len) for model in sorted(fleet.base_models)]
    cards += [ModelCard(a.adapter_id, a.adapter_id, a.base_model, max_model_len) for a in adapters.known]
    cards += [
        ModelCard(name, backend.model, backend.model, max_model_len)
        for name, backend in sorted(fleet.backends.items())
    ]
    return cards
