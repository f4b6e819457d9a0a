"""Runs a built gateway: starts its parts in order, and stops them."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from engine.errors import EngineStartError
from gateway.backends.host import Resident
from gateway.backends.port import BackendState
from gateway.config.settings import Settings
from gateway.ports import Services
from gateway.weights.errors import FetchError
from gateway.weights.progress import LogProgress
from gateway.wiring.core import Core
from gateway.wiring.engine import EngineParts
from gateway.wiring.serving import ServingParts

FLUSH_TIMEOUT_S = 5.0  # the longest wait for the ledger to write the last usage rows when the gateway stops
ENGINE_STOP_TIMEOUT_S = 15.0  # vLLM's core process takes more than five seconds to exit by itself


@dataclass(frozen=True, slots=True)
class Gateway:
    """A built gateway; :meth:`running` starts its engines and its background loops."""

    core: Core
    serving: ServingParts
    services: Services

    @property
    def settings(self) -> Settings:
        """The configuration; its models are local folders."""
        return self.core.base.settings

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engines, the ledger's writer and the state store while the block runs.

        Engines load in the background: the gateway is alive before it is ready.

        Raises PromptChanged, ConfigError, LedgerUnavailable, and in an ExceptionGroup: RoutingFileError if
        the state store has no revision either; EngineStartError, FetchError, TimeoutError if there is no
        other backend.
        """
        core = self.core
        ledger, state = core.accounts.ledger, core.base.state
        await state.open()
        try:
            await ledger.open()
            await core.model.publishing.publish()
            async with asyncio.TaskGroup() as loops:
                stores = [
                    loops.create_task(ledger.run(), name="ledger"),
                    loops.create_task(state.run(), name="state"),
                ]
                await core.control.routing.start()
                tasks = [
                    loops.create_task(core.adapters.run(self._engine_ready), name="adapters"),
                    *(
                        loops.create_task(self._run_engine(one), name=f"engine-{one.gate}")
                        for one in core.backends.engines.in_process
                    ),
                    *(loops.create_task(one.run(), name=name) for name, one in self._residents()),
                ]
                try:
                    yield
                finally:
                    _cancel(tasks)
                    stops = (one.host.stop(ENGINE_STOP_TIMEOUT_S) for one in core.backends.engines.in_process)
                    await asyncio.gather(*stops)
                    await ledger.close(FLUSH_TIMEOUT_S)
                    _cancel(stores)
        finally:
            core.model.grammars.close()
            for process in core.model.tokenizers.processes:
                process.close()
            await core.access.close()
            await state.close()
            await asyncio.to_thread(core.base.tracing.shutdown)

    def _residents(self) -> Iterator[tuple[str, Resident]]:
        core = self.core
        yield from core.backends.engines.residents.items()
        if core.generation.answers.cache is not None:
            yield "response-cache", core.generation.answers.cache
        if core.backends.summaries is not None:
            yield "summaries", core.backends.summaries
        yield "routing", core.control.routing
        yield "canary", core.control.canary
        yield "access", core.access
        yield "canary-guardrail", self.serving.guardrail
        yield "shadow", self.serving.shadow
        yield "first-ready", self.serving.first_ready
        yield "drain", self.serving.in_flight
        yield "background-responses", self.serving.background
        yield "batches", self.serving.batches.runner
        if self.core.backends.engines.pools:
            yield "worker-inspections", self.serving.inspections
        yield "console", self.services.console
        yield "engine-counts", core.accounts.engine_counts

    def _engine_ready(self) -> bool:
        engines = self.core.backends.engines.in_process
        return all(one.host.state is BackendState.READY for one in engines if one.name is None)

    async def _run_engine(self, engine: EngineParts) -> None:
        engines, weights, host = self.core.backends.engines, engine.weights, engine.host
        text = self.core.model.models.of(engine.section.model_id)
        log = structlog.get_logger("gateway").bind(model=engine.section.model_id)
        try:
            await weights.fetch(LogProgress(weights.source, self.core.base.clock))
            async with host.starting, asyncio.timeout(engine.section.start_timeout_seconds):
                facts = await host.start()
        except (EngineStartError, FetchError, TimeoutError) as error:
            if self.serving.in_flight.draining:
                return  # Ctrl-C reaches the engine's process too, before that ignores signals
            if not engines.residents and len(engines.in_process) == 1:
                raise
            # The other backends keep answering; `/ready` and `/health/deep` report the missing engine.
            log.error("engine not started", reason=str(error) or "start_timeout_seconds have passed")
            await host.stop(ENGINE_STOP_TIMEOUT_S)
            return
        text.limit(min(text.max_model_len, facts.max_model_len))
        log.info(
            "engine ready",
            max_model_len=text.max_model_len,
            total_blocks=facts.total_blocks,
            **facts.details,
        )
        await host.keep()


def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks, except those that a failed start has cancelled: again would interrupt their closing."""
    for task in tasks:
        if not task.cancelling():
            task.cancel()
