"""LoRA adapters in vLLM, as the adapter shelf wants them: by name, with a folder that may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType

from adapters.values import Adapter
from engine.errors import AdapterNotFound, AdapterNotLoaded, EngineDead
from gateway.backends.vllm.values import LoadedEngine, Lora

# Above every number that the registry gives, within vLLM's signed 32 bits.
FIRST_FRESH = 1 << 30


class VllmAdapters:
    """What is loaded.

    vLLM knows adapters by integers, and keeps the prefix cache of a number after its weights are gone. A
    registered version never changes and has a number of its own, so that what is loaded again finds its old
    blocks. A number that was used for other weights is replaced by a fresh one.
    """

    def __init__(self, engine: Callable[[], LoadedEngine | None]) -> None:
        self._engine = engine
        self._fresh = count(FIRST_FRESH)
        self._numbers: dict[int, tuple[str, str]] = {}  # what each number stands for, for good
        self._loaded: dict[str, Lora] = {}

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
            await engine.remove_lora(old.number)

    async def unload_adapter(self, adapter_id: str) -> None:
        """Take no new request for it.

        Raises:
            EngineError: it is not loaded, or the engine is gone.
        """
        lora = self._loaded.pop(adapter_id, None)
        if lora is None:
            raise AdapterNotLoaded(f"adapter {adapter_id} is not loaded")
        await self._living().remove_lora(lora.number)

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
