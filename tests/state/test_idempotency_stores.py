"""Replies kept under an idempotency key: in memory, in a real SQLite file and in a real Redis alike."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.state.errors import StateUnavailable
from gateway.state.idempotency import KEEP_S, IdempotencyStore, MemoryIdempotencyStore, StoredReply
from gateway.state.idempotency_redis import RedisIdempotencyStore
from gateway.state.idempotency_sqlite import SqliteIdempotencyStore
from gateway.state.redis_client import connect
from tests.state.servers import RedisServer, free_port

REPLY = StoredReply(200, "application/json", b'{"a":1}\x00\xff')


class Time:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


Make = Callable[[Time], IdempotencyStore]


@pytest.fixture(params=["memory", "sqlite", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes a store over the same data; the memory's own."""
    if request.param == "memory":
        return lambda time: MemoryIdempotencyStore(unix_time=time)
    if request.param == "sqlite":
        return lambda time: SqliteIdempotencyStore(tmp_path / "s.db", unix_time=time)
    server: RedisServer = request.getfixturevalue("one_redis")
    server.flush()
    return lambda time: RedisIdempotencyStore(connect(server.url), namespace="test", unix_time=time)


async def test_a_reply_is_kept_for_a_day_per_tenant_and_key(make: Make) -> None:
    time = Time()
    store = make(time)
    await store.put("acme", "k", "print", REPLY)
    assert await store.get("acme", "k") == ("print", REPLY)
    assert await store.get("other", "k") is None
    assert await store.get("acme", "other") is None
    assert await store.get("acm", "ek") is None
    await store.put("acme", "k", "second", StoredReply(200, "text/plain", b"x"))
    assert await store.get("acme", "k") == ("print", REPLY), "the first reply stays"
    time.now += KEEP_S + 1
    assert await store.get("acme", "k") is None
    await store.put("acme", "k", "third", REPLY)
    assert await store.get("acme", "k") == ("third", REPLY)
    await store.close()


async def test_replies_survive_a_restart(make: Make) -> None:
    stores = [make(Time()), make(Time())]
    if isinstance(stores[0], MemoryIdempotencyStore):
        stores = stores[:1]
    for store in stores:
        await store.put("acme", "k", "print", REPLY)
        assert await store.get("acme", "k") == ("print", REPLY)
        await store.close()


async def test_the_oldest_go_when_there_are_too_many(one_redis: RedisServer, tmp_path: Path) -> None:
    one_redis.flush()
    time = Time()
    stores: list[IdempotencyStore] = [
        MemoryIdempotencyStore(unix_time=time, max_replies=3),
        RedisIdempotencyStore(connect(one_redis.url), namespace="few", unix_time=time, max_replies=3),
    ]
    for store in stores:
        for number in range(5):
            time.now += 1
            await store.put("acme", f"k{number}", "print", REPLY)
        found = [await store.get("acme", f"k{number}") is not None for number in range(5)]
        assert found == [False, False, True, True, True]
        await store.close()
    # SQLite looks at every hundredth reply.
    kept = SqliteIdempotencyStore(tmp_path / "few.db", unix_time=time, max_replies=3)
    for number in range(101):
        time.now += 1
        await kept.put("acme", f"k{number}", "print", REPLY)
    assert [await kept.get("acme", f"k{n}") is not None for n in (0, 97, 98, 100)] == [
        False,
        False,
        True,
        True,
    ]
    await kept.close()


async def test_a_store_that_is_down_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    nowhere = connect(f"redis://127.0.0.1:{free_port()}")
    away: list[IdempotencyStore] = [
        SqliteIdempotencyStore(tmp_path / "file" / "s.db", unix_time=Time()),
        RedisIdempotencyStore(nowhere, namespace="test", unix_time=Time()),
    ]
    for store in away:
        with pytest.raises(StateUnavailable):
            await store.get("acme", "k")
        with pytest.raises(StateUnavailable):
            await store.put("acme", "k", "print", REPLY)
        await store.close()


async def test_it_answers_again_when_the_lock_is_gone(tmp_path: Path) -> None:
    store = SqliteIdempotencyStore(tmp_path / "s.db", unix_time=Time(), busy_timeout_s=0.05)
    lock = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    lock.execute("begin immediate")
    with pytest.raises(StateUnavailable):
        await store.put("acme", "k", "print", REPLY)
    lock.execute("rollback")
    await store.put("acme", "k", "print", REPLY)
    lock.close()
    await store.close()
