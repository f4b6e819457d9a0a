"""A whole gateway while it runs: what is started, in which order, and how it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from accounting.engine_counts import EngineCounts
from accounting.ledger import Ledger
from engine.errors import EngineStartError
from gateway.backends.fleet import Fleet
from gateway.backends.port import BackendState
from gateway.config.settings import Settings
from gateway.health.drain import Drain
from gateway.health.first_ready import FirstReady
from gateway.ports import Services
from gateway.prompts.engine_summary import EngineSummarizer
from gateway.prompts.model_text import ModelText
from gateway.prompts.published import Publishing
from gateway.requests.in_flight import InFlightRequests
from gateway.weights.errors import FetchError
from gateway.weights.progress import LogProgress
from gateway.weights.source import Weights
from gateway.wiring.adapters import Adapters
from gateway.wiring.backends import Engines
from gateway.wiring.cache import Answers
from gateway.wiring.canary import Canary
from gateway.wiring.keys import KeyParts
from gateway.wiring.limits import Limiting
from gateway.wiring.routing import Routing
from gateway.wiring.shadow import Shadows
from gateway.wiring.state import StateParts
from observability.tracing import Tracing

# Longest wait for the last usage rows and spans when the gateway stops.
FLUSH_TIMEOUT_S = 5.0
# vLLM's core takes more than five seconds to leave by itself.
ENGINE_STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """A whole gateway, built but not running; :meth:`running` starts its engine and its loops."""

    settings: Settings
    services: Services
    reception: InFlightRequests
    engines: Engines
    ledger: Ledger
    state: StateParts
    tracing: Tracing
    text: ModelText
    fleet: Fleet
    routing: Routing
    weights: Weights
    publishing: Publishing
    answers: Answers
    adapters: Adapters
    canary: Canary
    keys: KeyParts
    limiting: Limiting
    shadows: Shadows
    first_ready: FirstReady
    drain: Drain
    summaries: EngineSummarizer | None = None
    engine_counts: EngineCounts | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine, the ledger's writer and the state store while the block runs.

        The engine loads in the background: the gateway is alive before it is ready.

        Raises:
            PromptChanged: a published prompt version has another text now.
            ExceptionGroup: holding the RoutingFileError when the routing file is wrong and the state store
                has no revision to use instead.
            ExceptionGroup: holding the EngineStartError when the engine cannot start and nothing else
                could answer.
        """
        await self.ledger.open()
        await self.state.open()
        try:
            await self.publishing.publish()
            async with asyncio.TaskGroup() as loops:
                writer = loops.create_task(self.ledger.run(), name="ledger")
                state = loops.create_task(self.state.run(), name="state")
                await self.routing.book.start()
                residents = [
                    loops.create_task(resident.run(), name=name)
                    for name, resident in self.engines.residents.items()
                ]
                if self.answers.resident is not None:
                    residents.append(loops.create_task(self.answers.resident.run(), name="response-cache"))
                if self.summaries is not None:
                    residents.append(loops.create_task(self.summaries.run(), name="summaries"))
                residents.append(loops.create_task(self.adapters.run(self._engine_ready), name="adapters"))
                residents.append(loops.create_task(self.routing.book.run(), name="routing"))
                residents.append(loops.create_task(self.canary.driver.run(), name="canary"))
                residents.append(loops.create_task(self.keys.use.run(), name="keys-used"))
                residents.append(loops.create_task(self.shadows.shadow.run(), name="shadow"))
                residents.append(loops.create_task(self.limiting.run(), name="limits"))
                residents.append(loops.create_task(self.first_ready.run(), name="first-ready"))
                residents.append(loops.create_task(self.drain.run(), name="drain"))
                if self.engine_counts is not None:
                    residents.append(loops.create_task(self.engine_counts.run(), name="engine-counts"))
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
                    state.cancel()
        finally:
            await self.limiting.close()
            await self.state.close()
            await asyncio.to_thread(self.tracing.shutdown)

    def _engine_ready(self) -> bool:
        return self.engines.host is None or self.engines.host.state is BackendState.READY

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
        await host.keep()
