"""An order to load an adapter reaches every gateway and its workers; pins apply to workers too."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adapters.catalogue import CatalogueError
from adapters.values import Adapter
from gateway.admin.adapters import CommentBody
from gateway.lora.preload_orders import MAX_ORDERS, STREAM, AdapterOrders
from gateway.state.memory import MemoryStateStore, MemoryStreams
from resilience.failures import BackendFailure, FailureKind
from tests.adapters.registry_gateway import FakeEngine, gateway, until
from tests.adapters.test_several_gateways import active


@dataclass
class FakeWorker:
    """A worker that records its adapters; ``away``: it cannot be reached."""

    places: int = 4
    away: bool = False
    loaded: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)
    retired: set[str] = field(default_factory=set)

    async def preload(self, adapter: Adapter) -> None:
        if self.away:
            raise BackendFailure(FailureKind.BACKEND_UNAVAILABLE, "nobody listens there")
        self.loaded.add(adapter.adapter_id)

    async def keep(self, known: Sequence[Adapter], pinned: Collection[str], retired: Collection[str]) -> None:
        self.pinned, self.retired = set(pinned), set(retired)
        for adapter in known:
            if adapter.adapter_id in pinned:
                await self.preload(adapter)


async def test_an_order_at_one_gateway_is_carried_out_by_all(tmp_path: Path) -> None:
    streams, engines, worker = MemoryStreams(), (FakeEngine(), FakeEngine()), FakeWorker()
    async with (
        gateway(streams, tmp_path / "1") as one,
        gateway(streams, tmp_path / "2", workers=[worker]) as two,
    ):
        one.loader.make_slots(engines[0], 3)
        two.loader.make_slots(engines[1], 3)
        await active(one, tmp_path, "a", "b")
        assert (await one.admin.preload("a", who="key"))["others_told"] is True
        assert set(engines[0].adapters) == {"a"}
        await until(lambda: set(engines[1].adapters) == {"a"} == worker.loaded)
        await one.admin.retire("b", CommentBody(), who="key")
        with pytest.raises(CatalogueError, match="is retired"):
            await one.admin.preload("b", who="key")


async def test_an_order_that_fails_in_one_gateway_stops_neither_the_others_nor_later_orders(
    tmp_path: Path,
) -> None:
    streams, broken, sound = MemoryStreams(), FakeEngine(broken={"a"}), FakeEngine()
    async with gateway(streams, tmp_path / "1") as one, gateway(streams, tmp_path / "2") as two:
        one.loader.make_slots(sound, 3)
        two.loader.make_slots(broken, 3)
        await active(one, tmp_path, "a", "b")
        await one.admin.preload("a", who="key")
        await one.admin.preload("b", who="key")
        await until(lambda: set(broken.adapters) == {"b"})
        assert broken.log == ["load a", "load b"]


async def test_a_gateway_that_starts_later_carries_out_no_old_order(tmp_path: Path) -> None:
    streams, engine, later = MemoryStreams(), FakeEngine(), FakeEngine()
    async with gateway(streams, tmp_path / "1") as one:
        one.loader.make_slots(engine, 3)
        await active(one, tmp_path, "a", "b")
        await one.admin.preload("a", who="key")
        async with gateway(streams, tmp_path / "2") as two:
            two.loader.make_slots(later, 3)
            await until(lambda: two.admin.orders.head is not None)
            await one.admin.preload("b", who="key")
            await until(lambda: set(later.adapters) == {"b"})


async def test_while_the_state_store_is_away_it_is_loaded_here_and_the_answer_says_so(tmp_path: Path) -> None:
    streams, engine = MemoryStreams(), FakeEngine()
    async with gateway(streams, tmp_path / "1") as one:
        one.loader.make_slots(engine, 3)
        await active(one, tmp_path, "a")
        streams.down = True
        assert (await one.admin.preload("a", who="key"))["others_told"] is False
        assert set(engine.adapters) == {"a"}


async def test_orders_take_bounded_room_and_strange_ones_are_passed_over() -> None:
    streams, done = MemoryStreams(), list[str]()

    async def load(adapter_id: str, number: int) -> None:
        done.append(f"{adapter_id}@{number}")

    def store() -> MemoryStateStore:
        return MemoryStateStore(streams, unix_time=lambda: 0.0, poll_s=0.02)

    (mine, theirs) = store(), store()
    one, two = (AdapterOrders(state, me=name, load=load) for state, name in ((mine, "1"), (theirs, "2")))
    async with asyncio.TaskGroup() as loops:
        tasks = [loops.create_task(state.run()) for state in (theirs, two)]
        await until(lambda: two.head is not None)
        await mine.append(STREAM, b'{"of": "a later version"}', author="x")
        for number in range(MAX_ORDERS + 5):
            await one.send("a", number, author="x")
        await until(lambda: done[-1:] == [f"a@{MAX_ORDERS + 4}"])
        for task in tasks:
            task.cancel()
    assert len(await mine.read(STREAM)) == MAX_ORDERS


async def test_a_pin_holds_on_workers_and_one_of_their_places_is_left_to_others(tmp_path: Path) -> None:
    near, far = FakeWorker(places=2), FakeWorker(away=True)
    async with gateway(MemoryStreams(), tmp_path / "1", workers=[far, near]) as one:
        await active(one, tmp_path, "a", "b", "c")
        await one.admin.retire("c", CommentBody(), who="key")
        await one.admin.pin("a", True, who="key")
        async with asyncio.TaskGroup() as loops:
            keeping = loops.create_task(one.loader.run_workers())
            await until(lambda: near.loaded == {"a"} and far.pinned == {"a"})
            assert near.retired == {"c"}
            keeping.cancel()
        with pytest.raises(CatalogueError, match="a worker holds 2; one place must be left"):
            await one.admin.pin("b", True, who="key")
        with pytest.raises(BackendFailure, match="nobody listens there"):
            await one.admin.preload("b", who="key")
        assert near.loaded == {"a", "b"}
