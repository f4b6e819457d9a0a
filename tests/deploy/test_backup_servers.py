"""The documented backups of PostgreSQL's ledger and Redis' state, made and restored with real servers."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from sqlalchemy import func, select

from accounting.store import GenerationStore
from accounting.tables import generations
from benchmarks.ledger_postgres import NoPostgres, postgres, programs
from gateway.state.redis_client import connect
from gateway.state.redis_store import RedisStateStore
from tests.accounting.test_ledger import row
from tests.deploy.commands import documented, run_documented
from tests.state.servers import RedisServer, free_port, redis_server

WAIT_S = 60.0


async def count(store: GenerationStore) -> int:
    [found] = await store.select(select(func.count().label("rows")).select_from(generations))
    return int(found["rows"])


async def test_a_ledger_dumped_from_postgresql_takes_rows_again_in_another_database(tmp_path: Path) -> None:
    try:
        path = str(programs())
        server = postgres()
    except NoPostgres as missing:
        pytest.skip(str(missing))
    with server as running:
        plain = running.url.replace("+asyncpg", "")
        store = GenerationStore(running.url)
        store.connect()
        await store.prepare()
        await store.write([row(f"gen_{number}") for number in range(20)])
        await store.close(5.0)
        tools = {"path": path, "B": str(tmp_path)}
        run_documented("backup-postgres", "pg_dump", LEDGER=plain, **tools)
        run_documented("restore-postgres", "pg_restore", SERVER=plain, **tools)
        restored = GenerationStore(running.url.rpartition("/")[0] + "/sluice_restored")
        restored.connect()
        await restored.prepare()
        assert await count(restored) == 20
        await restored.write([row(f"gen_{number}") for number in range(10, 25)])
        assert await count(restored) == 25, "what is there stays, what is new is added"
        await restored.close(5.0)


def store_of(server: RedisServer) -> RedisStateStore:
    return RedisStateStore(connect(server.url), shown="redis", namespace="test", unix_time=time.time)


async def test_a_redis_restored_from_its_snapshot_has_the_streams_and_keeps_them(tmp_path: Path) -> None:
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed: scripts/test-env installs it with redis-server")
    with redis_server(tmp_path / "first", password="secret") as first:
        store = store_of(first)
        for number in range(1, 4):
            await store.append("routing", b"%d" % number, author="ops")
        url = documented()["backup-redis"].rpartition("# ")[2].strip().replace("PASSWORD", "secret")
        address = url.replace("HOST:6379", f"127.0.0.1:{first.port}")
        run_documented("backup-redis", "redis-cli", REDIS=address, B=str(tmp_path))
        before = await store.read("routing")
        await store.close()
    second = RedisServer(tmp_path / "second")
    second.folder.mkdir()
    run_documented(
        "restore-redis", "redis-server", B=str(tmp_path), DATA=str(second.folder), PORT=str(free_port())
    )
    try:
        for _ in range(2):  # a normal start, then a start after a crash
            second.start()
            store = store_of(second)
            assert (await store.read("routing"))[:3] == before
            await store.append("routing", b"4", author="ops")
            await store.close()
            second.kill()
    finally:
        second.kill()
