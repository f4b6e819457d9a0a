"""LoRA adapters in vLLM, as an ``AdapterHolder`` of :class:`LoraSlots`."""

from collections.abc import Callable, Collection, Mapping
from itertools import count
from pathlib import Path

from adapters.values import Adapter
from engine.errors import AdapterNotFound, EngineDead
from gateway.backends.vllm.compat.engine import VllmEngine
from gateway.backends.vllm.values import Lora

FIRST_FRESH = 1 << 30  # above every number that the registry gives, within vLLM's signed 32 bits


class VllmAdapters:
    """The loaded adapters.

    vLLM identifies adapters by integers and keeps cached blocks under an adapter's name after it is unloaded.
    So that name contains a number that is unique to the weights: the registered version's, or a fresh one if
    that was used for other weights.
    """

    def __init__(self, engine: Callable[[], VllmEngine | None]) -> None:
        self._engine = engine
        self._fresh = count(FIRST_FRESH)
        self._numbers: dict[int, tuple[str, str]] = {}  # the weights of each number; never reused
        self._loaded: dict[str, Lora] = {}
        self._pinned: set[int] = set()

    @property
    def adapters(self) -> Mapping[str, str]:
        return {name: lora.path for name, lora in self._loaded.items()}

    def get(self, adapter_id: str) -> Lora:
        return self._loaded[adapter_id]

    async def load_adapter(self, adapter: Adapter) -> None:
        engine, adapter_id, path = self._running_engine(), adapter.adapter_id, adapter.path
        if not (Path(path) / "adapter_config.json").is_file():
            raise AdapterNotFound(f"adapter {adapter_id}: {path} has no adapter_config.json")
        lora, old = Lora(adapter_id, self._number(adapter), path), self._loaded.get(adapter_id)
        if lora == old:
            return  # loaded for a caller that was cancelled
        await engine.add_lora(lora)
        self._loaded[adapter_id] = lora
        if old is not None:
            self._pinned.discard(old.number)
            await engine.remove_lora(old.number)

    async def unload_adapter(self, adapter_id: str) -> None:
        lora = self._loaded.pop(adapter_id)
        self._pinned.discard(lora.number)
        await self._running_engine().remove_lora(lora.number)

    async def pin_adapters(self, names: Collection[str]) -> None:
        """Pin the loaded ones of ``names`` in vLLM's batch, but leave one place free. Raises EngineError.

        vLLM cannot unpin: an adapter that is no longer in ``names`` keeps its place until it is unloaded.
        """
        engine = self._running_engine()
        for name in names:
            lora = self._loaded.get(name)
            if lora is None or lora.number in self._pinned or len(self._pinned) >= engine.shape.max_loras - 1:
                continue
            # An adapter without a place is tried again by a later call.
            if await engine.pin_lora(lora.number) and self._loaded.get(name) == lora:
                self._pinned.add(lora.number)

    def _number(self, adapter: Adapter) -> int:
        number, weights = adapter.engine_id, (adapter.adapter_id, adapter.path)
        if self._numbers.setdefault(number, weights) == weights:
            return number
        number = next(self._fresh)
        self._numbers[number] = weights
        return number

    def _running_engine(self) -> VllmEngine:
        engine = self._engine()
        if engine is None or engine.dead:
            raise EngineDead("the engine is not running")
        return engine
