"""The embedded engine as the gateway's engine in process."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

from adapters.values import Adapter
from admission.values import BackendLoad
from engine.client import EngineClient
from engine.errors import EngineDead
from engine.values import EngineConfig
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.host import EngineFacts
from gateway.backends.lora_slots import LoraSlots, MakeSlots
from gateway.backends.port import Backend, BackendState
from observability.events import EngineFigures, LoraFigures
from resilience.heartbeat import PromptTokens


class EmbeddedHost:
    """Starts and stops the embedded engine's process and makes backends on it.

    Args:
        make_backend: makes a backend of the engine's fields ``name``, ``client``, ``adapters`` and
            ``max_running``.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_backend: Callable[..., EmbeddedBackend],
        *,
        on_step: Callable[[int], None],
        on_death: Callable[[EngineDead], None],
        make_slots: MakeSlots = LoraSlots,
        kv_blocks: int | None = None,
    ) -> None:
        if kv_blocks is not None:
            config = replace(config, num_blocks=kv_blocks)
        self._config = config
        self._client = EngineClient(
            config, on_signals=lambda signals: on_step(signals.preemptions), on_death=on_death
        )
        self._adapters = make_slots(HeldAdapters(self._client), config.max_loras)
        self._backend = make_backend(
            name="", client=self._client, adapters=self._adapters, max_running=config.max_num_seqs
        )

    @property
    def state(self) -> BackendState:
        return self._backend.state

    @property
    def unfinished(self) -> int:
        return self._client.in_flight

    @property
    def pending(self) -> PromptTokens:
        adapters = self._client.pending_adapter_tokens
        base = self._client.pending_tokens - adapters
        return PromptTokens.in_a_step(base, adapters, self._config.max_num_batched_tokens)

    @property
    def computed_tokens(self) -> int:
        return 0 if self._client.signals is None else self._client.signals.tokens_scheduled

    @property
    def occupied(self) -> bool:
        return self._client.is_loading_adapters

    @property
    def last_error(self) -> str:
        return self._client.death

    @property
    def exit_code(self) -> int | None:
        return self._client.exit_code

    def find_processes(self) -> Sequence[psutil.Process]:
        found = []
        if (pid := self._client.pid) is not None and self._client.exit_code is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    async def start(self) -> EngineFacts:
        info = await self._client.start()
        return EngineFacts(
            info.max_model_len,
            info.block_size,
            info.total_blocks,
            {
                "parameters": info.parameters,
                "dtype": info.dtype,
                "device": info.device,
                "load_s": round(info.load_s, 2),
            },
        )

    async def stop(self, timeout_s: float) -> None:
        await self._client.stop(timeout_s)

    def backend(self, name: str) -> Backend:
        return replace(self._backend, name=name)

    def figures(self) -> EngineFigures | None:
        info, load, model = self._client.info, self._backend.load, self._backend.model
        signals, in_use = self._client.signals, self._adapters.in_use
        if info is None:
            return None
        if load is None or signals is None:
            return EngineFigures(
                model, BackendLoad(block_size=info.block_size, total_blocks=info.total_blocks)
            )
        return EngineFigures(
            model,
            load,
            prefix_queries=signals.prefix_queries,
            prefix_hits=signals.prefix_hits,
            preemptions=signals.preemptions,
            prompt_tokens=signals.prompt_tokens,
            generation_tokens=signals.generation_tokens,
            # The engine does not report which LoRA requests wait.
            loras=None if in_use is None else LoraFigures(self._config.max_loras, in_use),
        )


@dataclass(frozen=True, slots=True)
class HeldAdapters:
    """The engine's adapters as :class:`LoraSlots` needs them; the engine numbers each load itself."""

    client: EngineClient

    @property
    def adapters(self) -> Mapping[str, str]:
        return self.client.adapters

    async def load_adapter(self, adapter: Adapter) -> None:
        await self.client.load_adapter(adapter.adapter_id, adapter.path)

    async def unload_adapter(self, adapter_id: str) -> None:
        await self.client.unload_adapter(adapter_id)
