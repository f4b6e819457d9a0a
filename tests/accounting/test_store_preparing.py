"""The first use of a ledger's file, while another store or process migrates it."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from accounting.store import BUSY_TIMEOUT_MS, GenerationStore


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
