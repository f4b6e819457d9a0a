"""The embedded engine as the gateway's engine in process."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

from adapters.values import Adapter
from engine.client import EngineClient, EngineState
from engine.errors import EngineDead
from engine.values import EngineConfig, EngineSignals
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.embedded_vectors import EncodePart
from gateway.backends.host import EngineFacts
from gateway.backends.lora_slots import LoraSlots, MakeSlots
from gateway.backends.port import Backend, BackendState
from gateway.contracts.values import Sampling
from observability.events import EngineFigures, LoraFigures

# An engine that is not started yet is about to start.
_STATES: Mapping[EngineState, BackendState] = {
    **{state: BackendState(state) for state in EngineState if state is not EngineState.NEW},
    EngineState.NEW: BackendState.STARTING,
}


class EmbeddedHost:
    """Starts and stops the embedded engine's process and makes backends on it.

    Args:
        defaults: sampling of the checkpoint, used where the caller sets none.
        calls_tools: whether the model's chat template shows tools, and calls as ``CallReader`` reads.
        generates: false if the engine makes vectors alone.
        on_step: called after each step with the number of preemptions so far.
        encode: tokenizes the inputs of embeddings.
        on_death: called once, when the engine's process dies.
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
        make_slots: MakeSlots = LoraSlots,
        encode: EncodePart,
        calls_tools: bool = False,
        generates: bool = True,
        kv_blocks: int | None = None,
    ) -> None:
        if kv_blocks is not None:
            config = replace(config, num_blocks=kv_blocks)
        self.config = config
        self._model = model
        self.defaults = defaults
        self.token_bytes = token_bytes
        self.share_prefixes = share_prefixes
        self.encode = encode
        self.calls_tools = calls_tools
        self.generates = generates

        def on_signals(signals: EngineSignals) -> None:
            on_step(signals.preemptions)

        self.client = EngineClient(config, on_signals=on_signals, on_death=on_death)
        self.slots = make_slots(HeldAdapters(self.client), config.max_loras)
        # The limits of the loaded engine; None until it has started.
        self.facts: EngineFacts | None = None

    @property
    def state(self) -> BackendState:
        return _STATES[self.client.state]

    @property
    def unfinished(self) -> int:
        return self.client.in_flight

    @property
    def pending_tokens(self) -> int:
        return min(self.client.pending_tokens, self.config.max_num_batched_tokens)

    @property
    def computed_tokens(self) -> int:
        return 0 if self.client.signals is None else self.client.signals.tokens_scheduled

    @property
    def occupied(self) -> bool:
        return self.client.is_loading_adapters

    @property
    def last_error(self) -> str:
        return self.client.death

    @property
    def exit_code(self) -> int | None:
        return self.client.exit_code

    def find_processes(self) -> Sequence[psutil.Process]:
        found = []
        if (pid := self.client.pid) is not None and self.client.exit_code is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    async def start(self) -> EngineFacts:
        info = await self.client.start()
        self.facts = EngineFacts(
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
        return self.facts

    async def stop(self, timeout_s: float) -> None:
        await self.client.stop(timeout_s)

    def backend(self, name: str) -> Backend:
        return EmbeddedBackend(name, self._model, self)

    def figures(self) -> EngineFigures | None:
        facts, signals, in_use = self.facts, self.client.signals, self.slots.in_use
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
            prompt_tokens=signals.prompt_tokens,
            generation_tokens=signals.generation_tokens,
            # The engine does not report which LoRA requests wait.
            loras=None if in_use is None else LoraFigures(self.config.max_loras, in_use),
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
