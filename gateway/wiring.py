"""The composition root: the only place that knows concrete classes and constructs them."""

from __future__ import annotations

import asyncio
import importlib.metadata
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from accounting.account import Accounts
from accounting.keys import KeyRing
from accounting.ledger import Ledger
from adapters.registry import AdapterRegistry
from admission.controller import AdmissionController
from admission.values import Limits
from budgeting.counting import ChatTokenizer
from engine.client import EngineClient
from engine.values import EngineConfig, EngineInfo, EngineSignals
from gateway.backends.adapter_shelf import AdapterShelf
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.port import Backend
from gateway.config import ConfigError, EngineSection, Settings
from gateway.dispatch import Dispatcher
from gateway.fallback import CachedAnswer, FallbackChain
from gateway.fleet import Fleet
from gateway.health import HealthProbe
from gateway.idempotency_store import SqliteIdempotencyStore
from gateway.journey import Journey
from gateway.keys import Keys
from gateway.model_text import ModelText, sampling_defaults
from gateway.ports import HttpLimits, ModelCard, Services
from gateway.prompts.versions import PromptVersions
from gateway.reception import Reception
from gateway.report import Reporter
from gateway.routing.revision import Known, Revision, load_routing
from gateway.vitals import Vitals
from observability.events import EngineFigures, RequestRecord
from observability.metrics import Metrics
from observability.subscribers import Hub
from observability.tracing import Tracing
from resilience.guard import Guard
from resilience.response_cache import ResponseCache

# Longest wait for the last usage rows and spans when the gateway stops.
FLUSH_TIMEOUT_S = 5.0
ENGINE_STOP_TIMEOUT_S = 5.0


def version() -> str:
    """The installed version."""
    return importlib.metadata.version("sluice-gateway")


@dataclass(frozen=True, slots=True)
class Gateway:
    """A whole gateway, built but not running; :meth:`running` starts its engine and its loops."""

    settings: Settings
    services: Services
    reception: Reception
    engine: EngineClient
    ledger: Ledger
    state: SqliteIdempotencyStore
    tracing: Tracing
    text: ModelText
    fleet: Fleet
    revision: Revision

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine, the ledger's writer and the state store while the block runs.

        The engine loads in the background: the gateway is alive before it is ready.

        Raises:
            ExceptionGroup: holding the EngineStartError when the engine cannot start.
        """
        await self.ledger.open()
        await self.state.open()
        try:
            async with asyncio.TaskGroup() as loops:
                writer = loops.create_task(self.ledger.run(), name="ledger")
                starter = loops.create_task(self._start_engine(), name="engine-start")
                try:
                    yield
                finally:
                    starter.cancel()
                    await self.engine.stop(ENGINE_STOP_TIMEOUT_S)
                    await self.ledger.close(FLUSH_TIMEOUT_S)
                    writer.cancel()
        finally:
            await self.state.close()
            await asyncio.to_thread(self.tracing.shutdown, FLUSH_TIMEOUT_S)

    async def _start_engine(self) -> None:
        async with asyncio.timeout(self.settings.engine.start_timeout_seconds):
            info = await self.engine.start()
        self.text.limit(min(self.text.max_model_len, info.max_model_len))
        structlog.get_logger("gateway").info(
            "engine ready",
            model=self.settings.engine.model_id,
            parameters=info.parameters,
            dtype=info.dtype,
            device=info.device,
            max_model_len=self.text.max_model_len,
            total_blocks=info.total_blocks,
            load_s=round(info.load_s, 2),
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
    model_folder = Path(settings.engine.model)
    log = structlog.get_logger("gateway")
    tokenizer = ChatTokenizer.from_folder(model_folder)
    text = ModelText(tokenizer, settings.engine.max_model_len)
    vitals = Vitals(clock)
    engine = EngineClient(
        engine_config(settings.engine),
        on_signals=lambda signals: vitals.saw_preemptions(signals.preemptions),
        on_death=lambda error: log.error("engine died", reason=str(error)),
    )
    fleet = Fleet(_backends(settings, engine, model_folder, tokenizer))
    versions = PromptVersions.from_folder(Path(settings.prompts.folder))
    adapters = (
        AdapterRegistry.from_file(Path(settings.adapters.file), base_model=settings.engine.model_id)
        if settings.adapters.file
        else AdapterRegistry(())
    )
    revision = load_routing(Path(settings.routing.file), Known(fleet.backends, versions.ids, adapters.ids))
    metrics = Metrics(version=version(), known_routes=revision.routes, known_backends=fleet.backends)
    metrics.read_engine(lambda: _figures(settings.engine.model_id, engine.signals, engine.info))
    metrics.read_routing_revision(lambda: revision.number)
    hub = Hub(metrics)

    def finished(record: RequestRecord) -> None:
        vitals.saw(record)
        hub.emit(record)
        if observe is not None:
            observe(record)

    reception = Reception(metrics.in_flight)
    admission = AdmissionController(
        Limits(
            max_queue=settings.admission.max_queue,
            max_wait_s=settings.admission.max_wait_ms / 1000,
            # The planner has made every prompt fit the model; a shorter cap comes with the trim-and-retry.
            max_input_tokens=settings.engine.max_model_len,
            kv_pressure=settings.admission.kv_pressure,
        ),
        load=fleet.load,
        clock=clock,
        emit=hub.emit,
    )
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
    journey = Journey(
        reception=reception,
        revision=lambda: revision,
        versions=versions,
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
        ),
        clock=clock,
        unix_time=unix_time,
    )
    health = HealthProbe(
        fleet=fleet,
        reception=reception,
        vitals=vitals,
        text=lambda: text.service,
        model_loaded=lambda: engine.info is not None,
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
    return Gateway(settings, services, reception, engine, ledger, state, tracing, text, fleet, revision)


def new_id(prefix: str) -> str:
    """A fresh id: the prefix and 80 random bits."""
    return f"{prefix}_{secrets.token_hex(10)}"


def engine_config(section: EngineSection) -> EngineConfig:
    """The embedded engine's settings; what is not set keeps the engine's own default."""
    optional = {
        name: value
        for name in ("max_num_batched_tokens", "kv_cache_bytes")
        if (value := getattr(section, name)) is not None
    }
    return EngineConfig(
        model=section.model,
        dtype=section.dtype,
        device=section.device,
        max_model_len=section.max_model_len,
        block_size=section.block_size,
        max_num_seqs=section.max_num_seqs,
        num_blocks=section.num_blocks,
        num_threads=section.num_threads,
        seed=section.seed,
        enable_prefix_caching=section.enable_prefix_caching,
        gpu_memory_utilization=section.gpu_memory_utilization,
        max_loras=section.max_loras,
        max_lora_rank=section.max_lora_rank,
        **optional,
    )


def _backends(
    settings: Settings, engine: EngineClient, folder: Path, tokenizer: ChatTokenizer
) -> Mapping[str, Backend]:
    adapters = AdapterShelf(engine, settings.engine.max_loras)
    return {
        name: EmbeddedBackend(
            name,
            model=settings.engine.model_id,
            client=engine,
            defaults=sampling_defaults(folder),
            max_running=settings.engine.max_num_seqs,
            token_bytes=tokenizer.token_bytes,
            adapters=adapters,
            share_prefixes=settings.engine.share_prefix_across_tenants,
        )
        for name in settings.backends
    }


def _models(fleet: Fleet, adapters: AdapterRegistry, max_model_len: int) -> Sequence[ModelCard]:
    cards = [ModelCard(model, model, None, max_model_len) for model in sorted(fleet.base_models)]
    cards += [ModelCard(a.adapter_id, a.adapter_id, a.base_model, max_model_len) for a in adapters.known]
    cards += [
        ModelCard(name, backend.model, backend.model, max_model_len)
        for name, backend in sorted(fleet.backends.items())
    ]
    return cards


def _figures(model: str, signals: EngineSignals | None, info: EngineInfo | None) -> EngineFigures | None:
    if info is None:
        return None
    if signals is None:
        return EngineFigures(model, block_size=info.block_size, total_blocks=info.total_blocks)
    return EngineFigures(
        model_name=model,
        running=signals.running,
        waiting=signals.waiting,
        kv_usage=signals.kv_usage,
        block_size=signals.block_size,
        total_blocks=signals.total_blocks,
        prefix_queries=signals.prefix_queries,
        prefix_hits=signals.prefix_hits,
        preemptions=signals.preemptions,
    )
