"""Replies stored under an idempotency key: the same in memory, in a real SQLite file and in a real Redis."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.state.errors import StateUnavailable
from gateway.state.idempotency import (
    CLAIM_S,
    ENTRY_BYTES,
    KEEP_S,
    Claim,
    IdempotencyStore,
    ReplyBounds,
    StoredReply,
)
from gateway.state.idempotency_redis import RedisIdempotencyStore
from gateway.state.idempotency_sqlite import SqliteIdempotencyStore
from gateway.state.redis_client import connect
from tests.state.servers import RedisServer, free_port

REPLY = StoredReply(200, "application/json", b'{"a":1}\x00\xff')

MEMORY = Path(":memory:")


class Time:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


Make = Callable[[Time], IdempotencyStore]


async def read(store: IdempotencyStore, tenant: str, key: str) -> tuple[str, StoredReply | None] | None:
    return await store.get(tenant, key, Claim("reader", "print"), reads_only=True)


@pytest.fixture(params=["memory", "sqlite", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A function that makes stores over the same data; each memory store has its own."""
    if request.param == "memory":
        return lambda time: SqliteIdempotencyStore(MEMORY, unix_time=time)
    if request.param == "sqlite":
        return lambda time: SqliteIdempotencyStore(tmp_path / "s.db", unix_time=time)
    server: RedisServer = request.getfixturevalue("one_redis")
    server.flush()
    return lambda time: RedisIdempotencyStore(connect(server.url), namespace="test", unix_time=time)


async def test_a_reply_is_kept_for_a_day_per_tenant_and_key(make: Make) -> None:
    time = Time()
    store = make(time)
    await store.put("acme", "k", "print", REPLY)
    assert await read(store, "acme", "k") == ("print", REPLY)
    assert await read(store, "other", "k") is None
    assert await read(store, "acme", "other") is None
    assert await read(store, "acm", "ek") is None
    await store.put("acme", "k", "second", StoredReply(200, "text/plain", b"x"))
    assert await read(store, "acme", "k") == ("print", REPLY), "the first reply stays"
    time.now += KEEP_S + 1
    assert await read(store, "acme", "k") is None
    await store.put("acme", "k", "third", REPLY)
    assert await read(store, "acme", "k") == ("third", REPLY)
    await store.close()


async def test_one_of_two_gateways_claims_a_key_until_it_releases_it_or_stores_its_reply(make: Make) -> None:
    time = Time()
    here = make(time)
    there = here if here_only(here) else make(time)
    mine, other = Claim("t1", "print"), Claim("t2", "print 2")
    assert await here.get("acme", "k", mine) is None
    assert await here.get("acme", "k", mine) is None, "its own claim"
    assert await there.get("acme", "k", other) == ("print", None)
    assert await there.get("umbra", "k", other) is None, "keys are the tenant's"
    await there.release("acme", "k", other)
    assert await there.get("acme", "k", other) == ("print", None), "only the holder releases it"
    await here.release("acme", "k", mine)
    assert await there.get("acme", "k", other) is None
    await there.put("acme", "k", "print 2", REPLY)
    assert await here.get("acme", "k", mine) == ("print 2", REPLY)
    await here.close()
    if there is not here:
        await there.close()


async def test_a_claim_that_is_not_renewed_is_void_by_the_stores_clock(
    tmp_path: Path, one_redis: RedisServer
) -> None:
    time = Time()
    one_redis.flush()
    client = connect(one_redis.url)
    redis, file = (
        RedisIdempotencyStore(client, namespace="test", unix_time=time),
        SqliteIdempotencyStore(tmp_path / "s.db", unix_time=time),
    )
    mine, other = Claim("t1", "print"), Claim("t2", "print")
    for store in (redis, file):
        assert await store.get("acme", "k", mine) is None
    time.now += CLAIM_S - 1
    for store in (redis, file):
        await store.renew("acme", "k", mine)
        await store.renew("acme", "k", other)
    time.now += CLAIM_S - 1
    assert await file.get("acme", "k", other) == ("print", None), "it was renewed"
    time.now += 60
    assert await file.get("acme", "k", other) is None
    assert await redis.get("acme", "k", other) == ("print", None), "a gateway's clock does not count"
    [name] = [key async for key in client.scan_iter("*reply-claim*")]
    assert 0 < await client.pttl(name) <= CLAIM_S * 1000
    await redis.close()
    await file.close()


def here_only(store: IdempotencyStore) -> bool:
    """Whether no other store has the same data."""
    return isinstance(store, SqliteIdempotencyStore) and str(store._file.path) == ":memory:"


async def test_a_claim_of_a_gateway_that_ended_does_not_last_longer_when_the_clock_is_set_back(
    tmp_path: Path,
) -> None:
    time = Time()
    store = SqliteIdempotencyStore(tmp_path / "s.db", unix_time=time)
    time.now += 5 * 3600.0
    assert await store.get("acme", "k", Claim("1", "print")) is None
    time.now -= 5.0
    assert await store.get("acme", "k", Claim("2", "print")) == ("print", None), "a small step voids none"
    time.now -= 5 * 3600.0
    assert await store.get("acme", "k", Claim("2", "print")) is None
    await store.close()


async def test_replies_survive_a_restart(make: Make) -> None:
    for store in [make(Time()), make(Time())]:
        await store.put("acme", "k", "print", REPLY)
        assert await read(store, "acme", "k") == ("print", REPLY)
        await store.close()


@pytest.fixture(params=["memory", "sqlite", "redis"])
def bounded(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[Time, ReplyBounds], IdempotencyStore]:
    if request.param == "memory":
        return lambda time, bounds: SqliteIdempotencyStore(MEMORY, unix_time=time, bounds=bounds)
    if request.param == "sqlite":
        return lambda time, bounds: SqliteIdempotencyStore(tmp_path / "b.db", unix_time=time, bounds=bounds)
    server: RedisServer = request.getfixturevalue("one_redis")
    server.flush()
    return lambda time, bounds: RedisIdempotencyStore(
        connect(server.url), namespace="few", unix_time=time, bounds=bounds
    )


def of(size: int) -> StoredReply:
    """Return a reply that counts as ``size`` bytes against the bounds."""
    return StoredReply(200, "application/json", b"x" * (size - ENTRY_BYTES))


async def stored_keys(store: IdempotencyStore, tenant: str, keys: range) -> list[int]:
    return [number for number in keys if await read(store, tenant, f"k{number}") is not None]


async def test_a_tenant_drops_its_own_oldest_and_no_others(
    bounded: Callable[[Time, ReplyBounds], IdempotencyStore],
) -> None:
    time = Time()
    store = bounded(time, ReplyBounds(reply=4_000, tenant=10_000, all=100_000))
    await store.put("quiet", "k0", "print", of(2_000))
    for number in range(20):
        time.now += 1
        assert await store.put("flood", f"k{number}", "print", of(3_000))
    assert await stored_keys(store, "flood", range(20)) == [17, 18, 19]
    assert await stored_keys(store, "quiet", range(1)) == [0]
    assert not await store.put("flood", "large", "print", of(4_001)), "too large to be stored"
    assert await read(store, "flood", "large") is None
    await store.close()


async def test_beyond_the_bytes_of_all_the_tenant_with_most_drops_its_oldest(
    bounded: Callable[[Time, ReplyBounds], IdempotencyStore],
) -> None:
    time = Time()
    store = bounded(time, ReplyBounds(reply=4_000, tenant=8_000, all=16_000))
    await store.put("quiet", "k0", "print", of(2_000))
    for number in range(4):
        for tenant in ("b", "c"):
            time.now += 1
            await store.put(tenant, f"k{number}", "print", of(2_000))
    assert await stored_keys(store, "quiet", range(1)) == [0], "the oldest, of the tenant with least"
    left = [await stored_keys(store, tenant, range(4)) for tenant in ("b", "c")]
    assert sum(map(len, left)) == 7 and all(one[-1] == 3 for one in left)
    # Expired replies take no room, even those of a tenant that sends no further request.
    time.now += KEEP_S + 1
    for number in range(4):
        await store.put("b", f"n{number}", "print", of(2_000))
        await store.put("new", f"n{number}", "print", of(2_000))
    assert await read(store, "new", "n0") is not None
    await store.close()


async def test_a_store_that_is_down_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    nowhere = connect(f"redis://127.0.0.1:{free_port()}")
    away: list[IdempotencyStore] = [
        SqliteIdempotencyStore(tmp_path / "file" / "s.db", unix_time=Time()),
        RedisIdempotencyStore(nowhere, namespace="test", unix_time=Time()),
    ]
    for store in away:
        with pytest.raises(StateUnavailable):
            await read(store, "acme", "k")
        with pytest.raises(StateUnavailable):
            await store.put("acme", "k", "print", REPLY)
        await store.close()


async def test_a_store_answers_again_when_the_lock_is_released(tmp_path: Path) -> None:
    store = SqliteIdempotencyStore(tmp_path / "s.db", unix_time=Time(), busy_timeout_s=0.05)
    lock = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    lock.execute("begin immediate")
    with pytest.raises(StateUnavailable):
        await store.put("acme", "k", "print", REPLY)
    lock.execute("rollback")
    await store.put("acme", "k", "print", REPLY)
    lock.close()
    await store.close()
