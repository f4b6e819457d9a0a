"""The first use of a ledger's file, while another store or process migrates it; its open files."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from accounting.batch_tables import BatchCounts, BatchLine, BatchRow, FileRow, LineTokens
from accounting.batches import BatchStore
from accounting.store import BUSY_TIMEOUT_MS, GenerationStore
from accounting.stored_responses import ResponseStore, StoredResponse


async def test_a_store_waits_for_another_ones_migration_however_long_sqlite_itself_would(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("BEGIN IMMEDIATE")
        store = GenerationStore(f"sqlite+aiosqlite:///{path}", 1)
        store.connect()
        async with asyncio.TaskGroup() as group:
            preparing = group.create_task(store.prepare())
            await asyncio.sleep(2 * BUSY_TIMEOUT_MS / 1000)
            assert not preparing.done()
            other.execute("COMMIT")
        await store.close(5.0)
    other.close()


async def test_a_response_waits_for_another_connections_lock_longer_than_sqlite_itself_would(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    store = ResponseStore(f"sqlite+aiosqlite:///{path}", tenant_bytes=99)
    made, begun = (
        StoredResponse("acme", key, None, "queued", 10.0, 100.0, b"in", b"out", None, 20.0)
        for key in ("resp_1", "resp_2")
    )
    await store.put(begun)
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        async with asyncio.TaskGroup() as group:
            for change in (store.put(made), store.finish(replace(begun, status="completed"))):
                group.create_task(change)
            await asyncio.sleep(3 * BUSY_TIMEOUT_MS / 1000)
            other.execute("COMMIT")
    other.close()
    found = [await store.get("acme", key, 99.0) for key in ("resp_1", "resp_2")]
    assert [one and one.status for one in found] == ["queued", "completed"]
    await store.close()


async def test_each_write_of_a_batch_waits_for_another_connections_lock_longer_than_sqlite_itself_would(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    store = BatchStore(f"sqlite+aiosqlite:///{path}", "a")
    batch = BatchRow("batch_1", "acme", "key_1", None, "", "file-1", "in_progress", 10.0, 100.0, b"")
    await store.add(batch)
    line = BatchLine("batch_1", 0, 1, "r1", 0, 9)
    await store.set_lines("batch_1", [line, replace(line, place=1, number=2, custom_id="r2")])
    [ending, given_back] = await store.claim_lines("batch_1", 10.0, 20.0, 2)
    writes = (
        store.add_file(FileRow("file-1", "acme", "in.jsonl", "batch", 9, 10.0, None), 99),
        store.add(replace(batch, batch_id="batch_2")),
        store.set_lines("batch_2", [replace(line, batch_id="batch_2")]),
        store.finish(ending, "done", b"{}", None),
        store.give_back(given_back),
        store.extend_leases(30.0, ["batch_1"]),
    )
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        async with asyncio.TaskGroup() as group:
            for write in writes:
                group.create_task(write)
            await asyncio.sleep(3 * BUSY_TIMEOUT_MS / 1000)
            other.execute("COMMIT")
    other.close()
    assert [one.place for one in await store.claim_lines("batch_1", 10.0, 20.0, 9)] == [1]
    assert await store.counts("batch_1") == BatchCounts({"done": 1, "running": 1}, LineTokens())
    assert len(await store.unfinished()) == 2
    await store.close()


def open_files(path: Path) -> int:
    files = Path("/proc/self/fd").iterdir()
    return sum(os.path.exists(one) and os.path.samefile(one, path) for one in files)


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
async def test_a_storm_of_calls_opens_no_more_files_than_the_store_may_have_connections(
    tmp_path: Path,
) -> None:
    path, calls = tmp_path / "ledger.db", 40
    # SQLite keeps the files of closed connections while another one is open.
    one, other = (GenerationStore(f"sqlite+aiosqlite:///{path}", 3) for _ in range(2))
    for store in (one, other):
        store.connect()
        await store.prepare()

    async def call() -> None:
        async with one.transaction("not now") as connection:
            await connection.execute(text("SELECT 1"))
            await asyncio.sleep(0.001)

    for _ in range(3):
        async with asyncio.TaskGroup() as storm:
            for _ in range(calls):
                storm.create_task(call())
    assert open_files(path) <= 3 + 1
    for store in (one, other):
        await store.close(5.0)
    assert open_files(path) == 0
