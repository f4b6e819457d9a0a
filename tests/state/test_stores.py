"""The contract of every state store: the fake, SQLite and Redis."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.state.errors import Conflict, RecordTooLarge
from gateway.state.port import MAX_RECORD_BYTES, Record, StateStore
from tests.state.conftest import StoreRig, until


def data(number: int) -> bytes:
    return json.dumps({"n": number}).encode()


async def add(store: StateStore, count: int, stream: str = "s") -> list[Record]:
    return [await store.append(stream, data(n), author="ann") for n in range(1, count + 1)]


async def test_records_are_numbered_from_one_and_read_back_by_another_store_as_they_were_written(
    rig: StoreRig,
) -> None:
    async with rig.running() as writer, rig.running() as reader:
        written = await add(writer, 5)
        assert [record.number for record in written] == [1, 2, 3, 4, 5]
        assert list(await reader.read("s")) == written
        assert list(await reader.read("s", after=3)) == written[3:]
        assert list(await reader.read("s", after=1, limit=2)) == written[1:3]
        assert list(await reader.read("s", after=9)) == []
        assert list(await reader.read("s", limit=2, newest_first=True)) == [written[4], written[3]]
        assert list(await reader.read("s", after=3, newest_first=True)) == [written[4], written[3]]
        assert list(await reader.read("s", after=5, newest_first=True)) == []
        assert list(await reader.read("other")) == [] == list(await reader.read("other", newest_first=True))


async def test_what_was_forgotten_is_gone_and_the_others_keep_their_numbers(rig: StoreRig) -> None:
    async with rig.running() as store, rig.running() as other:
        written = await add(store, 5)
        await store.forget("s", 2)
        await store.forget("s", 1)
        await store.forget("nothing", 9)
        assert list(await other.read("s")) == written[2:]
        assert list(await other.read("s", after=1, limit=2)) == written[2:4]
        assert list(await other.read("s", after=3)) == written[3:]
        assert list(await other.read("s", limit=9, newest_first=True)) == written[:1:-1]
        with pytest.raises(Conflict):
            await other.append("s", data(6), author="ann", expected=3)
        assert (await other.append("s", data(6), author="ann", expected=5)).number == 6
        await other.forget("s", 99)
        assert list(await store.read("s")) == [] == list(await store.read("s", newest_first=True))
        assert (await store.heads())["s"] == 6
        assert (await store.append("s", data(7), author="ann")).number == 7
        assert [record.number for record in await other.read("s")] == [7]


async def test_streams_are_numbered_independently(rig: StoreRig) -> None:
    async with rig.running() as store:
        assert dict(await store.heads()) == {}
        await add(store, 2, "a")
        await add(store, 1, "b")
        assert dict(await store.heads()) == {"a": 2, "b": 1}


async def test_an_append_that_expects_another_head_writes_nothing_and_says_both_numbers(
    rig: StoreRig,
) -> None:
    async with rig.running() as store:
        await store.append("s", data(1), author="ann", expected=0)
        for wrong in (0, 2):
            with pytest.raises(Conflict, match=rf"'s'.*{wrong}.*found 1") as caught:
                await store.append("s", data(2), author="bob", expected=wrong)
            assert (caught.value.expected, caught.value.found) == (wrong, 1)
        assert dict(await store.heads()) == {"s": 1}
        assert (await store.append("s", data(2), author="bob", expected=1)).number == 2


async def test_of_writers_that_expect_the_same_head_one_wins(rig: StoreRig) -> None:
    async with rig.running() as one, rig.running() as two:
        for head in range(5):

            async def attempt(store: StateStore, head: int = head) -> bool:
                try:
                    await store.append("s", data(head), author="ann", expected=head)
                except Conflict:
                    return False
                return True

            assert sorted(await asyncio.gather(*map(attempt, (one, two, one, two)))) == [False] * 3 + [True]
        assert [record.number for record in await one.read("s")] == [1, 2, 3, 4, 5]


async def test_appends_without_an_expectation_never_conflict_nor_get_lost(rig: StoreRig) -> None:
    async with rig.running() as one, rig.running() as two:
        stores = [one, two] * 10
        done = await asyncio.gather(*(s.append("audit", data(n), author="x") for n, s in enumerate(stores)))
        assert sorted(record.number for record in done) == list(range(1, 21))
        kept = await one.read("audit")
        assert sorted(kept, key=lambda r: r.number) == list(kept) == sorted(done, key=lambda r: r.number)


async def test_listeners_are_told_of_what_others_append_and_at_every_poll(rig: StoreRig) -> None:
    async with rig.running() as writer, rig.running() as reader:
        announced: list[int] = []
        nothing: list[int] = []
        reader.listen("s", announced.append)
        reader.listen("never", nothing.append)
        for number in range(1, 4):
            await writer.append("s", data(number), author="ann")
            await until(lambda number=number: bool(announced) and announced[-1] == number)  # type: ignore[misc]
        count = len(announced)
        await until(lambda: len(announced) >= count + 2)
        assert announced[-1] == 3 and set(nothing) == {0}


async def test_a_writer_hears_of_its_own_append_at_once(rig: StoreRig) -> None:
    async with rig.running(loop=False) as store:
        announced: list[int] = []
        store.listen("s", announced.append)
        await store.append("s", data(1), author="ann")
        assert announced == [1]


async def test_a_record_that_is_too_large_is_refused_with_what_is_allowed(rig: StoreRig) -> None:
    async with rig.running() as store:
        with pytest.raises(RecordTooLarge, match=f"allowed: {MAX_RECORD_BYTES}"):
            await store.append("s", b'"' + b"x" * MAX_RECORD_BYTES + b'"', author="ann")
        assert dict(await store.heads()) == {}


async def test_data_of_the_largest_size_and_of_any_text_comes_back_as_it_was(rig: StoreRig) -> None:
    async with rig.running() as store:
        texts = [b'"' + b"x" * (MAX_RECORD_BYTES - 2) + b'"', '"漫画\\n"'.encode(), b"[\n1,\n2]\n", b"0"]
        for text in texts:
            await store.append("s", text, author="Ωmega ann")
        kept = await store.read("s")
        assert [record.data for record in kept] == texts and kept[0].author == "Ωmega ann"


async def test_a_store_is_healthy_once_it_was_reached(rig: StoreRig) -> None:
    store = rig.make()
    assert store.healthy is False
    await store.open()
    assert store.healthy is True
    await store.close()
