"""The embedded engine as the gateway's engine in process."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from engine.client import EngineClient
from engine.errors import EngineDead
from engine.values import EngineConfig, EngineSignals
from gateway.backends.adapter_shelf import AdapterShelf
from gateway.backends.embedded import EmbeddedBackend, state_of
from gateway.backends.host import EngineFacts
from gateway.backends.port import Backend, BackendState
from gateway.contracts.values import Sampling
from observability.events import EngineFigures, LoraFigures


class EmbeddedHost:
    """Starts and stops the embedded engine's process and makes backends on it.

    Args:
        config: the engine's settings.
        model: the base model's public id.
        defaults: sampling of the checkpoint, where the caller is silent.
        token_bytes: what a token id stands for.
        share_prefixes: let tenants find each other's cached prefixes.
        on_step: takes the counter of preemptions after each step.
        on_death: told once, when the engine's process dies.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: str,
        defaults: Sampling,
        token_bytes: Callable[[int], bytes],
        share_prefixes: bool,
        on_step: Callable[[int], None],
        on_death: Callable[[EngineDead], None],
    ) -> None:
        self._config = config
        self._model = model
        self._defaults = defaults
        self._token_bytes = token_bytes
        self._share_prefixes = share_prefixes

        def on_signals(signals: EngineSignals) -> None:
            on_step(signals.preemptions)

        self._client = EngineClient(config, on_signals=on_signals, on_death=on_death)
        self._adapters = AdapterShelf(self._client, config.max_loras)
        self._facts: EngineFacts | None = None

    @property
    def state(self) -> BackendState:
        """Where the engine stands."""
        return state_of(self._client)

    @property
    def facts(self) -> EngineFacts | None:
        """What has loaded."""
        return self._facts

    async def start(self) -> EngineFacts:
        """Start the engine's process; it loads there."""
        info = await self._client.start()
        self._facts = EngineFacts(
            info.max_model_len,
            info.block_size,
            info.total_blocks,
            MappingProxyType(
                {
                    "parameters": info.parameters,
                    "dtype": info.dtype,
                    "device": info.device,
                    "load_s": round(info.load_s, 2),
                }
            ),
        )
        return self._facts

    async def stop(self, timeout_s: float) -> None:
        """End the engine's process."""
        await self._client.stop(timeout_s)

    def backend(self, name: str) -> Backend:
        """The engine as a backend; all of them share its adapters."""
        return EmbeddedBackend(
            name,
            model=self._model,
            client=self._client,
            defaults=self._defaults,
            max_running=self._config.max_num_seqs,
            token_bytes=self._token_bytes,
            adapters=self._adapters,
            share_prefixes=self._share_prefixes,
        )

    def figures(self) -> EngineFigures | None:
        """What the metrics show of it."""
        facts, signals, in_use = self._facts, self._client.signals, self._adapters.in_use
        if facts is None:
            return None
        if signals is None:
            return EngineFigures(self._model, block_size=facts.block_size, total_blocks=facts.total_blocks)
        return EngineFigures(
            model_name=self._model,
            running=signals.running,
            waiting=signals.waiting,
            kv_usage=signals.kv_usage,
            block_size=signals.block_size,
            total_blocks=signals.total_blocks,
            prefix_queries=signals.prefix_queries,
            prefix_hits=signals.prefix_hits,
            preemptions=signals.preemptions,
            # The engine does not tell which of their requests wait.
            loras=None if in_use is None else LoraFigures(self._config.max_loras, in_use),
        )
