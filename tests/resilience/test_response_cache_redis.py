"""Answers stored in a real Redis: shared, expired in time, and no error when Redis dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import redis as blocking_redis

from gateway.state.redis_client import connect
from resilience.response_cache import ResponseCache, digest_of
from resilience.response_cache_redis import RedisStore
from resilience.response_cache_values import (
    MAX_SHELF,
    CachedAnswer,
    CacheEvent,
    LookedUp,
    Lookup,
    StoreBroke,
    StoredAnswer,
    StoreError,
    StoreIsBack,
)
from tests.state.servers import RedisServer, redis_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), durable=True) as running:
        yield running


@asynccontextmanager
async def store_on(
    server: RedisServer, *, ttl_s: float = 60.0, now: float | None = None
) -> AsyncIterator[RedisStore]:
    clock = time.time if now is None else (lambda: now)
    store = RedisStore(connect(server.url), prefix="sluice:{test}:cache:", ttl_s=ttl_s, unix_time=clock)
    try:
        yield store
    finally:
        await store.close()


def entry(key: str, *, put_at: float | None = None) -> StoredAnswer:
    return StoredAnswer(key, CachedAnswer("für dich ☂", "stop"), time.time() if put_at is None else put_at)


@pytest.fixture(autouse=True)
def empty(server: RedisServer) -> None:
    server.flush()


async def test_what_one_process_keeps_another_finds(server: RedisServer) -> None:
    async with store_on(server) as one, store_on(server) as other:
        stored = entry("a")
        await one.put([stored, entry("b")])
        assert await other.get("a") == stored
        assert await other.get("b") is not None
        assert await other.get("c") is None


async def test_similar_questions_are_shared_newest_first_and_bounded(server: RedisServer) -> None:
    async with store_on(server) as one, store_on(server) as other:
        vector = bytes(range(8))
        made = [replace(entry(str(n)), shelf="s", vector=vector) for n in range(MAX_SHELF + 5)]
        await one.put([*made, entry("alone")])
        shelf = await other.shelf("s")
        assert shelf == [(str(n), vector) for n in reversed(range(5, MAX_SHELF + 5))]
        assert await other.shelf("t") == []
        with blocking_redis.Redis.from_url(server.url) as client:
            assert 0 < client.pttl("sluice:{test}:cache:similar:s") <= 60_000
            client.lpush("sluice:{test}:cache:similar:t", b"\xff\x00nonsense")
        with pytest.raises(StoreError):
            await one.shelf("t")


async def test_a_question_that_is_asked_again_and_again_displaces_no_other_question(
    server: RedisServer,
) -> None:
    async with store_on(server) as store:
        await store.put([replace(entry("rare"), shelf="s", vector=bytes(8))])
        for n in range(MAX_SHELF + 5):
            await store.put([replace(entry("often"), shelf="s", vector=bytes([n]) * 8)])
        assert await store.shelf("s") == [("often", bytes([MAX_SHELF + 4]) * 8), ("rare", bytes(8))]


async def test_entries_leave_redis_by_themselves(server: RedisServer) -> None:
    async with store_on(server, ttl_s=0.05) as store:
        await store.put([entry("a"), entry("b")])
        with blocking_redis.Redis.from_url(server.url) as client:
            deadline = time.monotonic() + 60
            while client.dbsize():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)


async def test_an_entry_that_is_too_old_is_not_given_though_redis_has_it(server: RedisServer) -> None:
    async with store_on(server) as store:
        await store.put([entry("a", put_at=time.time() - 61)])
        assert await store.get("a") is None


async def test_another_machine_s_clock_may_be_a_little_ahead(server: RedisServer) -> None:
    async with store_on(server) as store:
        await store.put([entry("a", put_at=time.time() + 2)])
        assert await store.get("a") is not None


async def test_a_row_that_nobody_understands_is_an_error_of_the_store(server: RedisServer) -> None:
    async with store_on(server) as store:
        with blocking_redis.Redis.from_url(server.url) as client:
            client.set("sluice:{test}:cache:entry:a", b"\xff\x00nonsense")
        with pytest.raises(StoreError):
            await store.get("a")


async def test_an_answer_that_an_earlier_version_stored_is_a_miss(server: RedisServer) -> None:
    async with store_on(server) as store:
        with blocking_redis.Redis.from_url(server.url) as client:
            client.set("sluice:{test}:cache:text:a", msgspec.msgpack.encode(("answer", "stop", time.time())))
        assert await store.get("a") is None


async def test_questions_are_not_stored_in_redis(server: RedisServer) -> None:
    async with store_on(server) as store:
        cache = ResponseCache(store, clock=time.time, emit=lambda event: None)
        cache.remember(
            lambda: question("Where does Petra Miller live?"), CachedAnswer("I cannot tell.", "stop")
        )
        await cache.flush()
        with blocking_redis.Redis.from_url(server.url) as client:
            everything = b"".join(
                key + (client.get(key) or b"" if client.type(key) == b"string" else b"")
                for key in client.scan_iter()
            )
        assert b"I cannot tell." in everything
        assert b"etra" not in everything and b"iller" not in everything


def question(text: str) -> str:
    return digest_of([text])


async def test_a_killed_redis_is_a_miss_and_answers_are_found_again_when_it_is_back(
    server: RedisServer,
) -> None:
    events: list[CacheEvent] = []
    async with store_on(server) as store:
        cache = ResponseCache(store, clock=time.time, emit=events.append, timeout_s=30.0)

        async def find() -> CachedAnswer | None:
            return await cache.find(question("Who created Berserk?"))

        cache.remember(lambda: question("Who created Berserk?"), CachedAnswer("Kentaro Miura.", "stop"))
        await cache.flush()
        assert await find() is not None
        server.kill()
        assert await find() is None and await find() is None
        cache.remember(lambda: question("Who created Bleach?"), CachedAnswer("Tite Kubo.", "stop"))
        await cache.flush()
        kinds = [event.kind for event in events if isinstance(event, LookedUp)]
        assert kinds == [Lookup.EXACT, Lookup.ERROR, Lookup.ERROR]
        assert len([event for event in events if isinstance(event, StoreBroke)]) == 1
        server.start()
        deadline = time.monotonic() + 60
        while (after := await find()) is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert after.text == "Kentaro Miura."
        assert any(isinstance(event, StoreIsBack) for event in events)


async def test_a_connection_that_closes_before_the_command_is_written_is_an_error_of_the_store() -> None:
    class Closed:
        async def get(self, name: str) -> bytes:  # as uvloop says it
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")

    client: Any = Closed()
    with pytest.raises(StoreError, match="RuntimeError"):
        await RedisStore(client, "p:", ttl_s=60.0, unix_time=lambda: 1.0).get("key")
