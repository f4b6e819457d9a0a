"""The adapter commands that vLLM receives, with a fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.values import Adapter
from engine.errors import AdapterUnreadable, EngineDead
from gateway.backends.port import Completion, DeltaSink, Work
from gateway.backends.vllm.adapters import VllmAdapters
from gateway.backends.vllm.values import EngineShape, Lora, name_of


class FakeEngine:
    """Stores adapters like vLLM; a batch has slots for three."""

    def __init__(self) -> None:
        self.shape = EngineShape(4096, 32, 100, max_num_seqs=8, max_loras=3)
        self.dead = False
        self.unfinished = 0
        self.loaded: dict[int, Lora] = {}
        self.ever: list[Lora] = []
        self.pinned: set[int] = set()
        self.busy = False
        self.broken = False

    async def run(self, work: Work, out: DeltaSink, lora: Lora | None = None) -> Completion:
        raise AssertionError("nobody asks it")

    async def add_lora(self, lora: Lora) -> None:
        if self.broken:
            raise AdapterUnreadable(lora.name)
        self.loaded[lora.number] = lora
        self.ever.append(lora)

    async def remove_lora(self, number: int) -> None:
        self.loaded.pop(number, None)
        self.pinned.discard(number)

    async def pin_lora(self, number: int) -> bool:
        if self.busy or number not in self.loaded:
            return False
        assert len(self.pinned) < self.shape.max_loras, "all places pinned: vLLM could run nothing else"
        self.pinned.add(number)
        return True

    def give_up(self) -> None:
        self.dead = True

    def shutdown(self, timeout_s: float) -> None:
        self.dead = True


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def held(engine: FakeEngine) -> VllmAdapters:
    return VllmAdapters(lambda: engine)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "adapter_config.json").write_text("{}")
    return str(tmp_path)


async def test_other_weights_never_get_a_number_or_name_that_vllm_has_seen(
    engine: FakeEngine, held: VllmAdapters, folder: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapter_config.json").write_text("{}")
    for adapter in (
        Adapter("manga", 1, "demo", folder),
        Adapter("manga", 2, "demo", folder),  # registered anew, in the same folder
        Adapter("manga", 2, "demo", str(other)),  # the same number for another folder
        Adapter("style", 2, "demo", folder),
    ):
        await held.load_adapter(adapter)
    assert len({lora.number for lora in engine.ever}) == 4
    assert len({lora.key for lora in engine.ever}) == 4
    assert [name_of(lora.key) for lora in engine.ever] == ["manga"] * 3 + ["style"]


async def test_an_adapter_that_is_loaded_again_has_its_old_number_and_key(
    engine: FakeEngine, held: VllmAdapters, folder: str
) -> None:
    adapter = Adapter("manga", 1, "demo", folder)
    await held.load_adapter(adapter)
    await held.unload_adapter("manga")
    await held.load_adapter(adapter)
    first, again = engine.ever
    assert first == again


async def test_a_load_that_fails_keeps_the_old_weights(
    engine: FakeEngine, held: VllmAdapters, folder: str
) -> None:
    await held.load_adapter(Adapter("manga", 1, "demo", folder))
    engine.broken = True
    with pytest.raises(AdapterUnreadable):
        await held.load_adapter(Adapter("manga", 2, "demo", folder))
    assert held.get("manga").number == 1
    assert set(engine.loaded) == {1}


async def test_pins_leave_a_place_of_the_batch_to_the_others(
    engine: FakeEngine, held: VllmAdapters, folder: str
) -> None:
    names = ["a", "b", "c"]
    for number, name in enumerate(names, start=1):
        await held.load_adapter(Adapter(name, number, "demo", folder))
    for _ in range(2):
        await held.pin_adapters([*names, "not loaded"])
    assert engine.pinned == {1, 2}


async def test_unloading_an_adapter_removes_its_pin_and_it_can_be_pinned_again(
    engine: FakeEngine, held: VllmAdapters, folder: str
) -> None:
    adapter = Adapter("a", 1, "demo", folder)
    await held.load_adapter(adapter)
    await held.pin_adapters(["a"])
    await held.unload_adapter("a")
    assert not engine.pinned
    await held.load_adapter(adapter)
    await held.pin_adapters(["a"])
    assert engine.pinned == {1}


async def test_a_pin_that_finds_no_place_is_tried_again(
    engine: FakeEngine, held: VllmAdapters, folder: str
) -> None:
    await held.load_adapter(Adapter("a", 1, "demo", folder))
    engine.busy = True
    await held.pin_adapters(["a"])
    assert not engine.pinned
    engine.busy = False
    await held.pin_adapters(["a"])
    assert engine.pinned == {1}


async def test_an_engine_that_is_gone_pins_nothing(engine: FakeEngine, held: VllmAdapters) -> None:
    engine.dead = True
    with pytest.raises(EngineDead):
        await held.pin_adapters(["a"])
