"""LoRA adapters in vLLM, as :class:`LoraSlots` needs them: by name, with a folder that may change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType

from adapters.values import Adapter
from engine.errors import AdapterNotFound, AdapterNotLoaded, EngineAdapterError, EngineDead
from gateway.backends.vllm.values import LoadedEngine, Lora

# Above every number that the registry gives, within vLLM's signed 32 bits.
FIRST_FRESH = 1 << 30


class VllmAdapters:
    """What is loaded.

    vLLM knows adapters by integers, and keeps what was cached under an adapter's name when that is gone. A
    registered version never changes and has a number of its own, which is part of that name too: what is
    loaded again finds its old blocks, and nothing else does. A number that was used for other weights is
    replaced by a fresh one.
    """

    def __init__(self, engine: Callable[[], LoadedEngine | None]) -> None:
        self._engine = engine
        self._fresh = count(FIRST_FRESH)
        self._numbers: dict[int, tuple[str, str]] = {}  # the weights of each number; never reused
        self._loaded: dict[str, Lora] = {}
        self._pinned: set[int] = set()

    @property
    def adapters(self) -> Mapping[str, str]:
        """What is loaded: id and folder."""
        return MappingProxyType({name: lora.path for name, lora in self._loaded.items()})

    def get(self, adapter_id: str) -> Lora:
        """A loaded adapter."""
        return self._loaded[adapter_id]

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load, or replace by other weights; requests under way keep the ones they began with.

        Raises:
            EngineError: it cannot be loaded; nothing has changed.
        """
        engine, adapter_id, path = self._living(), adapter.adapter_id, adapter.path
        if not (Path(path) / "adapter_config.json").is_file():
            raise AdapterNotFound(f"adapter {adapter_id}: {path} has no adapter_config.json")
        lora, old = Lora(adapter_id, self._number(adapter), path), self._loaded.get(adapter_id)
        if lora == old:
            return  # a load whose caller had left
        await engine.add_lora(lora)
        self._loaded[adapter_id] = lora
        if old is not None:
            self._pinned.discard(old.number)
            await engine.remove_lora(old.number)

    async def unload_adapter(self, adapter_id: str) -> None:
        """Accept no new request for it.

        Raises:
            EngineError: it is not loaded, or the engine is gone.
        """
        lora = self._loaded.pop(adapter_id, None)
        if lora is None:
            raise AdapterNotLoaded(f"adapter {adapter_id} is not loaded")
        self._pinned.discard(lora.number)
        await self._living().remove_lora(lora.number)

    async def pin_adapters(self, names: Collection[str]) -> None:
        """Keep these, as far as they are loaded, in vLLM's batch, so that none waits for its weights.

        One of the batch's places is left to the others. vLLM cannot released a pin: an adapter that is
        pinned no longer keeps its place until it is unloaded.

        Raises:
            EngineError: the engine is gone.
        """
        engine = self._living()
        for name in names:
            lora = self._loaded.get(name)
            if lora is None or lora.number in self._pinned or len(self._pinned) >= engine.shape.max_loras - 1:
                continue
            try:
                await engine.pin_lora(lora.number)
            except EngineAdapterError:
                continue  # it was taken away meanwhile, or all places are at work: it is tried again
            if self._loaded.get(name) == lora:
                self._pinned.add(lora.number)

    def _number(self, adapter: Adapter) -> int:
        number, weights = adapter.engine_id, (adapter.adapter_id, adapter.path)
        if self._numbers.setdefault(number, weights) == weights:
            return number
        number = next(self._fresh)
        self._numbers[number] = weights
        return number

    def _living(self) -> LoadedEngine:
        engine = self._engine()
        if engine is None or engine.dead:
            raise EngineDead("the engine is not running")
        return engine
