"""What only a real file can show: locked, replaced, damaged, shared by processes."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import structlog

from gateway.state.errors import StateUnavailable
from gateway.state.local_copy import LocalCopy
from gateway.state.projection import ProjectionState
from gateway.state.sqlite_store import WATCH_S, SqliteStateStore
from gateway.state.stream_follower import StreamFollower
from tests.fork_server import ForkedPopen
from tests.state.conftest import until

APPENDER = """
import asyncio, sys, time
from pathlib import Path
from gateway.state.sqlite_store import WATCH_S, SqliteStateStore
async def main():
    store = SqliteStateStore(Path(sys.argv[1]), unix_time=time.time, busy_timeout_s=20.0)
    for number in range(int(sys.argv[3])):
        await store.append("s", b"[]", author=sys.argv[2])
    await store.close()
asyncio.run(main())
"""
LOCKER = """
import sqlite3, sys
lock = sqlite3.connect(sys.argv[1], isolation_level=None)
lock.execute("begin immediate")
print("locked", flush=True)
sys.stdin.read()
"""


def on(path: Path, **options: float) -> SqliteStateStore:
    return SqliteStateStore(path, unix_time=time.time, poll_s=0.1, **options)


def process(code: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *words]
    return ForkedPopen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def remove(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


async def test_while_another_process_holds_the_file_reading_goes_on_and_writing_is_refused_in_time(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.db"
    store = on(path, busy_timeout_s=0.3)
    await store.append("s", b"1", author="ann")
    with process(LOCKER, str(path)) as locker:
        assert locker.stdout is not None and locker.stdin is not None
        assert await asyncio.to_thread(locker.stdout.readline) == "locked\n"
        begun = time.monotonic()
        with pytest.raises(StateUnavailable, match="locked") as refused:
            await store.append("s", b"2", author="ann")
        assert 0.2 < time.monotonic() - begun < 15.0
        assert refused.value.writes_refused
        assert [record.data for record in await store.read("s")] == [b"1"]
        assert store.healthy, "it is there; only its writers wait"
        late = on(path, busy_timeout_s=0.3)
        await late.open()
        assert late.healthy, "a process that starts meanwhile reads it too"
        assert [record.data for record in await late.read("s")] == [b"1"]
        locker.stdin.close()
        await asyncio.to_thread(locker.wait)
    assert (await store.append("s", b"2", author="ann")).number == 2
    assert (await late.append("s", b"3", author="ann")).number == 3
    await store.close()
    await late.close()


async def test_processes_that_make_the_file_and_append_at_once_leave_no_gap_and_lose_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.db"
    children = [process(APPENDER, str(path), f"p{number}", "10") for number in range(3)]
    for child in children:
        with child:
            assert await asyncio.to_thread(child.wait, 60) == 0
    store = on(path)
    records = await store.read("s")
    assert [record.number for record in records] == list(range(1, 31))
    assert [sum(record.author == f"p{n}" for record in records) for n in range(3)] == [10] * 3
    await store.close()


async def test_a_file_that_is_replaced_is_opened_anew_and_what_it_lost_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = on(path)
    seen: list[int] = []
    follower = StreamFollower(
        store, "s", lambda record: seen.append(record.number), copy=None, clock=time.monotonic
    )
    await store.append("s", b"1", author="ann")
    await follower.start()
    async with asyncio.TaskGroup() as group:
        loops = [group.create_task(store.run()), group.create_task(follower.run())]
        await until(lambda: store.healthy)
        remove(path)
        await until(lambda: follower.state is ProjectionState.LOST)
        assert seen == [1]
        await until(lambda: store.healthy)
        other = on(path)
        assert [record.number for record in await other.read("s")] == []
        await other.close()
        for task in loops:
            task.cancel()
    await store.close()


async def test_a_file_that_is_gone_when_watching_begins_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = on(path)
    await store.append("s", b"1", author="ann")
    remove(path)
    announced: list[int] = []
    store.listen("s", announced.append)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.run())
        await until(lambda: bool(announced))
        task.cancel()
    assert set(announced) == {0} and path.exists()
    await store.close()


async def test_a_commit_of_another_process_is_noticed_before_the_next_poll(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = SqliteStateStore(path, unix_time=time.time, poll_s=600.0)
    other = on(path)
    await store.open()
    announced: list[int] = []
    store.listen("s", announced.append)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.run())
        for number in range(1, 6):
            await other.append("s", b"1", author="ann")
            await until(lambda number=number: number in announced)  # type: ignore[misc]
        task.cancel()
    await other.close()
    await store.close()


async def test_a_commit_that_can_be_read_only_a_while_after_it_changed_the_file_is_noticed_before_the_next_poll(
    tmp_path: Path,
) -> None:
    """As on a slow disk, for which a commit waits between the two."""
    path = tmp_path / "s.db"
    store, other = SqliteStateStore(path, unix_time=time.time, poll_s=600.0), on(path)
    files: list[list[tuple[int, ...] | None]] = [[(1,)]]
    store._reader.files = lambda: files[0]  # type: ignore[method-assign]
    await store.open()
    announced: list[int] = []
    store.listen("s", announced.append)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.run())
        for number in range(1, 4):
            files[0] = [(number + 1,)]
            await asyncio.sleep(3 * WATCH_S)
            await other.append("s", b"1", author="ann")
            await until(lambda number=number: number in announced)  # type: ignore[misc]
        task.cancel()
    await other.close()
    await store.close()


async def test_a_file_that_is_no_database_or_nowhere_is_an_absence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 1_000)
    reasons = {tmp_path / "text": "SQLITE_NOTADB", tmp_path / "no" / "folder" / "s.db": "SQLITE_CANTOPEN"}
    for path, reason in reasons.items():
        store = on(path)
        await store.open()
        assert store.healthy is False
        with pytest.raises(StateUnavailable, match=reason):
            await store.append("s", b"1", author="ann")
        with pytest.raises(StateUnavailable):
            await store.read("s")
        with pytest.raises(StateUnavailable):
            await store.heads()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(store.run())
            await asyncio.sleep(0.05)
            task.cancel()
        await store.close()


async def test_a_disk_that_takes_no_more_is_shown_until_it_takes_writes_again_though_the_file_is_read(
    tmp_path: Path,
) -> None:
    store = on(tmp_path / "s.db")
    await store.open()
    await store.append("s", b"1", author="ann")
    [(_, hard), size] = resource.getrlimit(resource.RLIMIT_FSIZE), (tmp_path / "s.db-wal").stat().st_size
    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.run())
        with structlog.testing.capture_logs() as logs:
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
                with pytest.raises(StateUnavailable):
                    await store.append("s", b"2", author="ann")
                for _ in range(30):
                    await asyncio.sleep(0.01)
                    assert store.healthy and store.refuses_writes
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            await until(lambda: not store.refuses_writes)
        task.cancel()
    events = [line["event"].partition(";")[0] for line in logs]
    assert events == ["state store is unreachable", "state store is back"]
    await store.close()


async def test_a_folder_that_comes_later_is_used_then(tmp_path: Path) -> None:
    path = tmp_path / "later" / "s.db"
    store = on(path)
    await store.open()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.run())
        path.parent.mkdir()
        await until(lambda: store.healthy)
        task.cancel()
    assert (await store.append("s", b"1", author="ann")).number == 1
    await store.close()


async def test_an_append_cancelled_at_any_moment_leaves_no_lock_and_no_gap(tmp_path: Path) -> None:
    store = on(tmp_path / "s.db", busy_timeout_s=0.5)
    await store.open()
    for turns in range(0, 60, 3):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(store.append("s", b"1", author="ann"))
            for _ in range(turns):
                await asyncio.sleep(0.0002)
            task.cancel()
    head = (await store.append("s", b"2", author="ann")).number
    assert [record.number for record in await store.read("s")] == list(range(1, head + 1))
    await store.close()


async def test_a_locked_file_at_the_start_is_served_from_the_local_copy(tmp_path: Path) -> None:
    path, copy = tmp_path / "s.db", LocalCopy(tmp_path / "copies", "s")
    first = on(path)
    copy.extend([await first.append("s", b"1", author="ann")])
    await first.close()
    # An exclusive lock without WAL: it blocks readers, too.
    with closing(sqlite3.connect(path, isolation_level=None)) as lock:
        lock.execute("PRAGMA locking_mode=EXCLUSIVE")
        lock.execute("PRAGMA journal_mode=DELETE")
        lock.execute("begin exclusive")
        store = on(path, busy_timeout_s=0.1)
        seen: list[int] = []
        follower = StreamFollower(
            store, "s", lambda record: seen.append(record.number), copy=copy, clock=time.monotonic
        )
        await store.open()
        await follower.start(0.5)
        assert seen == [1] and follower.state is ProjectionState.AWAY and not store.healthy
        lock.execute("rollback")
    async with asyncio.TaskGroup() as group:
        loops = [group.create_task(store.run()), group.create_task(follower.run())]
        await until(lambda: follower.state is ProjectionState.FOLLOWING and store.healthy)
        for task in loops:
            task.cancel()
    await store.close()
