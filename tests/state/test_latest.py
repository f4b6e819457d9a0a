"""``LatestRecord``: follows a stream of which only the last record counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.state.port import Record, StateStore
from gateway.state.projection import LatestRecord, ProjectionState
from tests.state.conftest import StoreRig, until


@contextlib.asynccontextmanager
async def latest(store: StateStore, seen: list[Record]) -> AsyncIterator[LatestRecord]:
    """Run the loop of a ``LatestRecord`` of stream ``s``; the store is opened and run by the caller."""
    one = LatestRecord(store, "s", seen.append)
    await one.start()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(one.run())
        yield one
        task.cancel()


async def test_the_last_record_is_in_force_at_the_start_and_whenever_there_is_another(rig: StoreRig) -> None:
    seen: list[Record] = []
    async with rig.running() as writer, rig.running() as reader:
        for number in range(5):
            await writer.append("s", b"%d" % number, author="x")
        await writer.forget("s", 4)
        async with latest(reader, seen) as one:
            assert (one.number, one.state) == (5, ProjectionState.FOLLOWING)
            await writer.append("s", b"6", author="x")
            await writer.forget("s", 5)
            await writer.append("s", b"7", author="x")
            assert await one.caught_up_to(7, 30)
        assert [seen[0].number, seen[-1].number] == [5, 7]
        assert seen[-1].data == b"7"


async def test_an_empty_stream_has_no_record_in_force_and_a_wait_for_one_ends_in_time(rig: StoreRig) -> None:
    seen: list[Record] = []
    async with rig.running() as store, latest(store, seen) as one:
        assert (one.number, one.state, seen) == (0, ProjectionState.FOLLOWING, [])
        assert not await one.caught_up_to(1, 0.01)


async def test_while_the_store_is_away_the_last_one_stays_and_it_is_caught_up_with_afterwards() -> None:
    streams, seen = MemoryStreams(), list[Record]()
    store = MemoryStateStore(streams, unix_time=lambda: 1.0, poll_s=0.01)
    streams.down = True
    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.run())
        async with latest(store, seen) as one:
            assert one.state is ProjectionState.AWAY
            streams.down = False
            await store.append("s", b"1", author="x")
            assert await one.caught_up_to(1, 30)
            assert one.state is ProjectionState.FOLLOWING
            streams.records["s"].clear()
            await until(lambda: one.state is ProjectionState.LOST)
            assert (one.number, len(seen)) == (1, 1)
        task.cancel()
