"""LoRA slots: an adapter is loaded once and evicted when idle, never while in use, whatever is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.errors import AdapterNotHere
from adapters.events import AdapterAsked
from adapters.values import Adapter
from engine.errors import AdapterNotFound, AdapterNotLoaded, NoAdapterRoom
from gateway.backends.lora_slots import LoraSlots
from resilience.failures import BackendFailure, FailureKind


class FakeEngine:
    """Loads when ``may_finish`` is set; like the real engine it continues when the caller is cancelled."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.adapters: dict[str, str] = {}
        self.log: list[str] = []
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.broken: set[str] = set()

    async def load_adapter(self, adapter: Adapter) -> None:
        adapter_id, path = adapter.adapter_id, adapter.path
        self.log.append(f"load {adapter_id}")
        try:
            await self.may_finish.wait()
            await asyncio.sleep(0)
        finally:
            if path in self.broken:
                raise AdapterNotFound(f"adapter folder {path} does not exist")
            if adapter_id not in self.adapters and len(self.adapters) >= self.places:
                raise NoAdapterRoom("full")
            self.adapters[adapter_id] = path

    async def unload_adapter(self, adapter_id: str) -> None:
        self.log.append(f"unload {adapter_id}")
        await asyncio.sleep(0)
        del self.adapters[adapter_id]


class SteppingEngine(FakeEngine):
    """Carries unloads out when it ``settles``, between two steps, also those whose caller was cancelled."""

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self.unloads: list[tuple[str, asyncio.Future[None]]] = []

    async def unload_adapter(self, adapter_id: str) -> None:
        self.unloads.append((adapter_id, asyncio.get_running_loop().create_future()))
        await self.unloads[-1][1]

    def settle(self) -> None:
        for adapter_id, settled in self.unloads:
            if self.adapters.pop(adapter_id, None) is None:
                settled.set_exception(AdapterNotLoaded(f"adapter {adapter_id!r} is not loaded"))
            elif not settled.done():
                settled.set_result(None)


def adapter(name: str, path: str | None = None) -> Adapter:
    return Adapter(name, 1, "demo", path or f"folder/{name}")


async def use(slots: LoraSlots, *names: str) -> None:
    for name in names:
        async with slots.hold(adapter(name)):
            await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


async def test_many_first_users_load_an_adapter_once() -> None:
    engine = FakeEngine(2)
    slots = LoraSlots(engine, 2)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(use(slots, "a"))
    assert engine.log == ["load a"]


async def test_the_longest_idle_adapter_makes_room() -> None:
    engine = FakeEngine(2)
    slots = LoraSlots(engine, 2)
    await use(slots, "a", "b", "a", "c")
    assert engine.log == ["load a", "load b", "unload b", "load c"]


async def test_a_caller_that_leaves_while_room_is_made_fails_no_load_of_the_next_one() -> None:
    engine = SteppingEngine(1)
    slots = LoraSlots(engine, 1)
    await use(slots, "a")
    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(use(slots, "b"))
        await until(lambda: len(engine.unloads) == 1)
        leaving.cancel()
        tasks.create_task(use(slots, "c"))
        await until(lambda: len(engine.unloads) == 2)
        engine.settle()
    assert engine.log == ["load a", "load c"]


async def test_an_adapter_in_use_is_not_taken_away_and_the_refusal_says_to_come_back() -> None:
    engine = FakeEngine(1)
    slots = LoraSlots(engine, 1)
    async with slots.hold(adapter("a")):
        with pytest.raises(
            BackendFailure, match="all 1 adapters that the engine can hold are in use"
        ) as caught:
            await use(slots, "b")
        assert caught.value.kind is FailureKind.THROTTLED
        assert caught.value.retry_after_s is not None
        assert not caught.value.counts, "the circuit is for all, and the base model goes on"
    await use(slots, "b")
    assert engine.log == ["load a", "unload a", "load b"]


async def test_a_load_that_fails_fails_its_requests_and_is_tried_again_after_a_while() -> None:
    engine, now, events = FakeEngine(1), [0.0], list[object]()
    slots = LoraSlots(engine, 1, clock=lambda: now[0], emit=events.append)
    engine.broken.add("folder/a")
    for _ in range(3):
        with pytest.raises(BackendFailure, match="cannot be loaded: adapter folder a does") as caught:
            await use(slots, "a")
        assert caught.value.kind is FailureKind.MODEL_NOT_FOUND
        assert (caught.value.param, caught.value.retry_after_s) == ("adapter_id", 1.0)
    assert engine.log == ["load a"]
    engine.broken.clear()
    now[0] = 1.0
    await use(slots, "a", "b")
    assert engine.log == ["load a", "load a", "unload a", "load b"]
    assert [type(one).__name__ for one in events if not isinstance(one, AdapterAsked)] == [
        "AdapterLoadFailed",
        "AdapterLoaded",
        "AdapterUnloaded",
        "AdapterLoaded",
    ]


async def test_a_broken_adapter_keeps_nobody_else_waiting() -> None:
    engine = FakeEngine(2)
    slots = LoraSlots(engine, 2)
    engine.broken.add("folder/a")
    with pytest.raises(BackendFailure):
        await use(slots, "a")
    engine.may_finish.clear()
    async with asyncio.TaskGroup() as tasks:
        loading = tasks.create_task(use(slots, "b"))
        await until(lambda: engine.log[-1] == "load b")
        with pytest.raises(BackendFailure):  # at once, although another load is in progress
            await use(slots, "a")
        engine.may_finish.set()
    assert loading.exception() is None


async def test_the_least_hot_idle_adapter_makes_room_not_the_longest_idle() -> None:
    engine = FakeEngine(2)
    slots = LoraSlots(engine, 2)
    await use(slots, "hot", "hot", "hot", "cold", "new")
    assert engine.adapters.keys() == {"hot", "new"}


async def test_a_pinned_adapter_is_loaded_ahead_and_never_makes_room() -> None:
    engine = FakeEngine(2)
    slots = LoraSlots(engine, 2)
    await use(slots, "a", "b")
    slots.residency.pin(["p"])
    assert await slots.load_next([adapter("a"), adapter("b"), adapter("p")])
    assert not await slots.load_next([adapter("a"), adapter("b"), adapter("p")])
    await use(slots, "c", "d", "e")
    assert "p" in engine.adapters


async def test_an_adapter_in_use_is_unloaded_only_when_its_last_request_has_ended() -> None:
    engine = FakeEngine(2)
    slots = LoraSlots(engine, 2)
    async with slots.hold(adapter("a")):
        await slots.unload("a")
        assert "a" in engine.adapters
    await slots.unload("a")
    assert engine.adapters == {}


async def test_files_are_brought_before_a_load_and_what_cannot_be_brought_fails_its_requests_alone() -> None:
    engine, brought, events = FakeEngine(2), list[str](), list[object]()

    async def bring(one: Adapter) -> None:
        brought.append(one.adapter_id)
        if one.adapter_id == "away":
            raise AdapterNotHere("s3://bucket/away: not reached")

    slots = LoraSlots(engine, 2, bring=bring, emit=events.append)
    await use(slots, "a", "a")
    # The caller's error does not say where operators keep their files; the event for the log does.
    for _ in range(2):
        with pytest.raises(
            BackendFailure, match="adapter away cannot be loaded: its files are not on"
        ) as caught:
            await use(slots, "away")
        assert "bucket" not in str(caught.value)
    assert "s3://bucket/away: not reached" in str(events)
    assert (brought, engine.log) == (["a", "away"], ["load a"])


async def test_a_name_whose_folder_has_changed_is_loaded_anew() -> None:
    engine = FakeEngine(1)
    slots = LoraSlots(engine, 1)
    async with slots.hold(adapter("a")), slots.hold(adapter("a", "folder/a2")):
        assert engine.adapters == {"a": "folder/a2"}
    assert engine.log == ["load a", "load a"]


async def test_a_waiting_request_takes_over_a_load_when_the_first_one_is_cancelled() -> None:
    engine = FakeEngine(1)
    engine.may_finish.clear()
    slots = LoraSlots(engine, 1)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(use(slots, "a"))
        await until(lambda: engine.log == ["load a"])
        second = tasks.create_task(use(slots, "a"))
        await asyncio.sleep(0)
        first.cancel()
        engine.may_finish.set()
    assert first.cancelled()
    assert second.exception() is None
    assert engine.adapters == {"a": "folder/a"}


async def test_an_adapter_of_a_cancelled_load_is_evicted_first() -> None:
    engine = FakeEngine(2)
    slots = LoraSlots(engine, 2)
    await use(slots, "a")
    engine.may_finish.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await use(slots, "orphan")
    engine.may_finish.set()
    await use(slots, "b")
    assert engine.adapters.keys() == {"a", "b"}


class SerialEngine(FakeEngine):
    """Loads one adapter after the other; a load whose caller is cancelled goes on."""

    loads: asyncio.Task[None] | None = None

    async def load_adapter(self, adapter: Adapter) -> None:
        before = self.loads

        async def load() -> None:
            if before is not None:
                await asyncio.wait([before])
            await super(SerialEngine, self).load_adapter(adapter)

        self.loads = asyncio.get_running_loop().create_task(load())
        await asyncio.wait([self.loads])
        self.loads.result()


async def test_an_adapter_that_is_loaded_for_nobody_any_more_makes_room_for_the_load_after_it() -> None:
    engine = SerialEngine(1)
    slots = LoraSlots(engine, 1)
    engine.may_finish.clear()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(use(slots, "a"))
        await until(lambda: engine.log == ["load a"])
        first.cancel()
        tasks.create_task(use(slots, "b"))
        await until(first.done)
        engine.may_finish.set()
    assert engine.log == ["load a", "load b", "unload a", "load b"]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.integers(0, 4), st.integers(0, 6), st.booleans()), max_size=30
    )
)
def test_an_adapter_stays_loaded_while_it_is_held_whatever_others_do(
    plan: list[tuple[str, int, int, bool]],
) -> None:
    async def main() -> None:
        engine = FakeEngine(2)
        slots = LoraSlots(engine, 2)

        async def user(name: str, start: int, length: int) -> None:
            for _ in range(start):
                await asyncio.sleep(0)
            try:
                async with slots.hold(adapter(name)):
                    for _ in range(length + 1):
                        assert engine.adapters.get(name) == f"folder/{name}"
                        await asyncio.sleep(0)
            except BackendFailure:
                assert len({one for one, *_ in plan}) > 2

        async with asyncio.TaskGroup() as tasks:
            for name, start, length, cancelled in plan:
                task = tasks.create_task(user(name, start, length))
                if cancelled:
                    asyncio.get_running_loop().call_soon(task.cancel)
        for name in "abc":
            await use(slots, name)  # every place is free again

    asyncio.run(main())


async def test_the_adapters_in_use_are_reported_once_one_was() -> None:
    slots = LoraSlots(FakeEngine(2), 2)
    assert slots.in_use is None
    async with slots.hold(adapter("a")):
        assert slots.in_use == ("a",)
        async with slots.hold(adapter("b")):
            assert set(slots.in_use) == {"a", "b"}
    assert slots.in_use == ()
