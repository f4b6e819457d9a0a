"""LoRA adapters in vLLM, as the adapter shelf wants them: by name, with a folder that may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType

from engine.errors import AdapterNotFound, AdapterNotLoaded, EngineDead
from gateway.backends.vllm.values import LoadedEngine, Lora


class VllmAdapters:
    """What is loaded.

    vLLM knows adapters by integers: each load gets a new one, so that neither its caches nor a request under
    way can take new weights for old ones.
    """

    def __init__(self, engine: Callable[[], LoadedEngine | None]) -> None:
        self._engine = engine
        self._numbers = count(1)
        self._loaded: dict[str, Lora] = {}

    @property
    def adapters(self) -> Mapping[str, str]:
        """What is loaded: id and folder."""
        return MappingProxyType({name: lora.path for name, lora in self._loaded.items()})

    def get(self, adapter_id: str) -> Lora:
        """A loaded adapter."""
        return self._loaded[adapter_id]

    async def load_adapter(self, adapter_id: str, path: str) -> None:
        """Load, or replace by other weights; requests under way keep the ones they began with.

        Raises:
            EngineError: it cannot be loaded; nothing has changed.
        """
        engine = self._living()
        if not (Path(path) / "adapter_config.json").is_file():
            raise AdapterNotFound(f"adapter {adapter_id}: {path} has no adapter_config.json")
        lora, old = Lora(adapter_id, next(self._numbers), path), self._loaded.get(adapter_id)
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

    def _living(self) -> LoadedEngine:
        engine = self._engine()
        if engine is None or engine.dead:
            raise EngineDead("the engine is not running")
        return engine
