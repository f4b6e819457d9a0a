"""A stream follower keeps up with its stream, also after the store was unavailable."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.state import stream_follower as module
from gateway.state.local_copy import LocalCopy
from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.state.port import Record, StateStore
from gateway.state.projection import ProjectionState
from gateway.state.stream_follower import StreamFollower
from tests.state.conftest import StoreRig, until


class Projection:
    """Collects the applied records; refuses the record with the number ``refused``."""

    def __init__(self, *, refused: int = 0) -> None:
        self.seen: list[Record] = []
        self.refused = refused

    def apply(self, record: Record) -> None:
        if record.number == self.refused:
            raise ValueError("not understood")
        self.seen.append(record)

    @property
    def numbers(self) -> list[int]:
        return [record.number for record in self.seen]


@contextlib.asynccontextmanager
async def following(
    store: StateStore,
    projection: Projection,
    *,
    copy: LocalCopy | None = None,
    start_timeout_s: float = 1.0,
    prepare: Callable[[Record], Awaitable[bool]] | None = None,
    informational: bool = False,
) -> AsyncIterator[StreamFollower]:
    """Run the loops of the store and of a follower of stream ``s``."""
    follower = StreamFollower(
        store,
        "s",
        projection.apply,
        copy=copy,
        clock=time.monotonic,
        prepare=prepare,
        informational=informational,
    )
    await store.open()
    await follower.start(start_timeout_s)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(store.run()), group.create_task(follower.run())]
            yield follower
            for task in tasks:
                task.cancel()
    finally:
        await store.close()


def memory(streams: MemoryStreams) -> MemoryStateStore:
    return MemoryStateStore(streams, unix_time=lambda: 12.5, poll_s=0.02)


async def add(store: StateStore, count: int) -> None:
    for number in range(count):
        await store.append("s", json.dumps({"n": number}).encode(), author="ann")


async def test_existing_and_new_records_are_applied_once_and_in_order(rig: StoreRig) -> None:
    projection = Projection()
    async with rig.running() as writer:
        await add(writer, 250)
        async with following(rig.make(), projection) as follower:
            assert follower.number == 250 and follower.state is ProjectionState.FOLLOWING
            for number in range(251, 261):
                await writer.append("s", b"{}", author="ann", expected=number - 1)
                assert await follower.caught_up_to(number, 5.0)
            await add(writer, 20)
            assert await follower.caught_up_to(280, 5.0)
            assert not await follower.caught_up_to(281, 0.05)
            assert follower.state is ProjectionState.FOLLOWING
        assert projection.numbers == list(range(1, 281))
        assert projection.seen[:250] == list(await writer.read("s", limit=250))


async def test_of_records_read_together_those_from_the_last_complete_state_on_are_applied(
    tmp_path: Path,
) -> None:
    async def complete(record: Record) -> bool:
        return record.number not in (9, 10)

    streams, copy = MemoryStreams(), LocalCopy(tmp_path, "s")
    store = memory(streams)
    await add(store, 10)
    projection = Projection()
    async with following(memory(streams), projection, copy=copy, prepare=complete) as follower:
        assert (projection.numbers, follower.number) == ([8, 9, 10], 10)
        await add(store, 1)
        await until(lambda: follower.number == 11)
        assert projection.numbers == [8, 9, 10, 11]
        await until(lambda: copy.head() == 11)
    projection = Projection()
    async with following(memory(streams), projection, copy=copy, prepare=complete):
        assert projection.numbers == [11]
    assert [record.number for record in copy.load()] == [*range(1, 12)]


async def test_a_gateway_starts_with_the_last_good_state_while_the_store_is_away_and_catches_up(
    tmp_path: Path,
) -> None:
    streams = MemoryStreams()
    copy = LocalCopy(tmp_path / "copies", "s")
    async with following(memory(streams), Projection(), copy=copy) as follower:
        await add(memory(streams), 3)
        assert await follower.caught_up_to(3, 5.0)
        await until(lambda: copy.head() == 3)
    streams.down = True
    late = Projection()
    with capture_logs() as logs:
        async with following(memory(streams), late, copy=copy) as follower:
            assert late.numbers == [1, 2, 3] and follower.number == 3
            assert follower.state is ProjectionState.AWAY
            assert any("local copy is in force" in line["event"] and line["number"] == 3 for line in logs)
            streams.down = False
            await add(memory(streams), 2)
            assert await follower.caught_up_to(5, 5.0)
            assert late.numbers == [1, 2, 3, 4, 5]
            await until(lambda: follower.state is ProjectionState.FOLLOWING)
    assert sum("state store is unreachable;" in line["event"] for line in logs) == 1, (
        "said once, not at every poll"
    )
    assert sum("state store is back" in line["event"] for line in logs) == 1


async def test_a_start_without_the_store_and_without_a_local_copy_says_that_there_is_none(
    tmp_path: Path,
) -> None:
    streams = MemoryStreams()
    streams.down = True
    with capture_logs() as logs:
        async with following(memory(streams), Projection(), copy=LocalCopy(tmp_path, "s")):
            pass
    assert logs[-1]["event"] == "state store unreachable at the start; there is no local copy"


async def test_a_store_that_hangs_does_not_keep_a_gateway_from_starting(tmp_path: Path) -> None:
    class Hanging(MemoryStateStore):
        async def read(self, stream: str, **_: object) -> list[Record]:  # type: ignore[override]
            await asyncio.sleep(60)
            return []

    begun = time.monotonic()
    follower = StreamFollower(
        Hanging(unix_time=time.time), "s", Projection().apply, copy=None, clock=time.monotonic
    )
    await follower.start(0.05)
    assert time.monotonic() - begun < 30 and follower.number == 0 and follower.state is ProjectionState.AWAY


@pytest.mark.parametrize("how", ["emptied", "shorter", "rewritten", "rewritten and longer"])
async def test_a_store_that_lost_records_undoes_nothing_and_logs_one_error(how: str) -> None:
    streams = MemoryStreams()
    projection = Projection()
    writer = memory(streams)
    with capture_logs() as logs:
        async with following(memory(streams), projection) as follower:
            await add(writer, 3)
            assert await follower.caught_up_to(3, 5.0)
            before = list(streams.records["s"])
            kept = {"emptied": 0, "shorter": 2, "rewritten": 2, "rewritten and longer": 1}[how]
            del streams.records["s"][kept:]
            for _ in range({"rewritten": 1, "rewritten and longer": 5}.get(how, 0)):
                await writer.append("s", b'"another"', author="bob")
            # A stream of unchanged length is compared every ten seconds; this compares it at once.
            follower._verified_at = None
            await until(lambda: follower.state is ProjectionState.LOST)
            assert projection.seen == before
            await asyncio.sleep(0.1)
            assert sum(line["log_level"] == "error" for line in logs) == 1, "said once"
            streams.records["s"][:] = [*before, Record("s", 4, 0.0, "ann", b"{}")]
            assert await follower.caught_up_to(4, 5.0), "put back, it goes on"
            assert follower.state is ProjectionState.FOLLOWING and projection.numbers == [1, 2, 3, 4]


async def test_a_stream_that_only_informs_begins_again_when_the_store_has_lost_records() -> None:
    projection, streams = Projection(), MemoryStreams()
    async with following(memory(streams), projection, informational=True) as follower:
        await add(memory(streams), 3)
        assert await follower.caught_up_to(3, 5.0)
        streams.records["s"].clear()
        await add(memory(streams), 1)
        await until(lambda: follower.number == 1)
        assert projection.numbers == [1, 2, 3, 1] and follower.state is ProjectionState.FOLLOWING


async def test_a_store_emptied_while_the_gateway_was_down_is_seen_by_the_local_copy(tmp_path: Path) -> None:
    copy = LocalCopy(tmp_path, "s")
    copy.extend([Record("s", number, 0.0, "ann", b"{}") for number in (1, 2)])
    projection = Projection()
    async with following(memory(MemoryStreams()), projection, copy=copy) as follower:
        assert follower.state is ProjectionState.LOST and projection.numbers == [1, 2]
    assert copy.head() == 2


async def test_a_stream_of_unchanged_length_is_compared_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "VERIFY_S", 0.1)
    streams = MemoryStreams()
    async with following(memory(streams), Projection()) as follower:
        await add(memory(streams), 1)
        assert await follower.caught_up_to(1, 5.0)
        streams.records["s"][0] = Record("s", 1, 0.0, "bob", b"{}")
        await until(lambda: follower.state is ProjectionState.LOST)


async def test_a_record_that_cannot_be_applied_stops_the_stream_before_it_and_is_tried_again() -> None:
    streams = MemoryStreams()
    projection = Projection(refused=2)
    with capture_logs() as logs:
        async with following(memory(streams), projection) as follower:
            await add(memory(streams), 3)
            await until(lambda: follower.state is ProjectionState.REFUSED)
            await asyncio.sleep(0.1)
            assert projection.numbers == [1] and follower.number == 1
            projection.refused = 0
            assert await follower.caught_up_to(3, 5.0)
            assert projection.numbers == [1, 2, 3] and follower.state is ProjectionState.FOLLOWING
    refusals = [line for line in logs if line["log_level"] == "error"]
    assert len(refusals) == 1 and "not understood" not in str(refusals), "said once, without its content"


async def test_the_local_copy_of_a_long_stream_is_written_once(tmp_path: Path) -> None:
    class Counted(LocalCopy):
        written = 0

        def extend(self, records: Sequence[Record]) -> bool:
            self.written += 1
            return super().extend(records)

    copy, streams = Counted(tmp_path, "s"), MemoryStreams()
    await add(memory(streams), 450)
    async with following(memory(streams), Projection(), copy=copy):
        await until(lambda: copy.head() == 450)
    assert copy.written == 1 and list(copy.load()) == streams.records["s"]


def test_a_local_copy_holds_the_records_as_they_were_and_is_its_owners_only(tmp_path: Path) -> None:
    copy = LocalCopy(tmp_path / "a" / "b", "s")
    assert copy.head() == 0 and list(copy.load()) == []
    records = [Record("s", n, 1700000000.123456 + n, "Ωmega", f'"漫画\\n{n}"\n'.encode()) for n in (1, 2, 3)]
    assert copy.extend(records[:2]) and copy.head() == 2
    assert copy.extend(records[1:]) and list(copy.load()) == records and copy.head() == 3
    assert copy.extend(records[:1]) and copy.head() == 3, "nothing is lost by an older word"
    assert stat.S_IMODE(copy.path.stat().st_mode) == 0o600
    assert [file.name for file in copy.path.parent.iterdir()] == ["s.jsonl"], "nothing is left beside it"


def test_a_local_copy_takes_neither_gaps_nor_another_history(tmp_path: Path) -> None:
    copy = LocalCopy(tmp_path, "s")
    copy.extend([Record("s", n, 0.0, "ann", b"{}") for n in (1, 2)])
    assert not copy.extend([Record("s", 4, 0.0, "ann", b"{}")])
    assert not copy.extend([Record("s", 2, 0.0, "bob", b"{}"), Record("s", 3, 0.0, "bob", b"{}")])
    assert copy.head() == 2


@pytest.mark.parametrize("damage", ["torn", "changed", "other stream", "no header", "binary", "empty"])
def test_a_damaged_local_copy_is_not_used_and_is_written_anew(tmp_path: Path, damage: str) -> None:
    copy = LocalCopy(tmp_path, "s")
    records = [Record("s", n, 0.0, "ann", b'{"n":1}') for n in (1, 2)]
    copy.extend(records)
    good = copy.path.read_bytes()
    copy.path.write_bytes(
        {
            "torn": good[:-9],
            "changed": good.replace(b"ann", b"bob"),
            "other stream": good.replace(b'"s"', b'"t"'),
            "no header": good.split(b"\n", 1)[1],
            "binary": b"\xff\x00" * 2_000,
            "empty": b"",
        }[damage]
    )
    with capture_logs() as logs:
        assert list(copy.load()) == []
    assert [line["event"] for line in logs] == ["local copy damaged, not used"]
    assert copy.head() == 0 and copy.path.with_suffix(".damaged").exists()
    assert copy.extend(records) and list(copy.load()) == records


async def test_a_local_copy_that_cannot_be_written_is_logged_and_keeps_nobody_from_following(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("not a folder")
    streams = MemoryStreams()
    with capture_logs() as logs:
        async with following(
            memory(streams), Projection(), copy=LocalCopy(tmp_path / "file", "s")
        ) as follower:
            await add(memory(streams), 1)
            assert await follower.caught_up_to(1, 5.0)
            await until(lambda: any(line["event"] == "local copy not written" for line in logs))
            await add(memory(streams), 1)
            assert await follower.caught_up_to(2, 5.0) and follower.state is ProjectionState.FOLLOWING
