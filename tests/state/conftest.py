"""Fixtures: every kind of state store, as several processes would open it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.state.port import StateStore
from gateway.state.redis_client import connect
from gateway.state.redis_store import RedisStateStore
from gateway.state.sqlite_store import SqliteStateStore
from tests.state.servers import RedisServer, redis_server


@dataclass(frozen=True)
class StoreRig:
    """Makes stores over the same data; ``running`` opens one and runs its loop."""

    make: Callable[[], StateStore]

    @contextlib.asynccontextmanager
    async def running(self, *, loop: bool = True) -> AsyncIterator[StateStore]:
        store = self.make()
        await store.open()
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(store.run()) if loop else None
                yield store
                if task is not None:
                    task.cancel()
        finally:
            await store.close()


async def until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until ``true()``, which another task or process makes true."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.005)


async def until_done(act: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await act():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.02)


@pytest.fixture(scope="session")
def one_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), durable=False, password="s3cret") as server:
        yield server


def redis_store(server: RedisServer, *, poll_s: float = 0.2) -> RedisStateStore:
    return RedisStateStore(
        connect(server.url), shown="redis", namespace="test", unix_time=time.time, poll_s=poll_s
    )


@pytest.fixture(params=["memory", "sqlite", "redis"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> StoreRig:
    if request.param == "memory":
        streams = MemoryStreams()
        return StoreRig(lambda: MemoryStateStore(streams, unix_time=time.time, poll_s=0.2))
    if request.param == "sqlite":
        path = tmp_path / "s.db"  # its writers wait for each other on one event loop, which may stall
        return StoreRig(lambda: SqliteStateStore(path, unix_time=time.time, poll_s=0.2, busy_timeout_s=30.0))
    server: RedisServer = request.getfixturevalue("one_redis")
    server.flush()
    return StoreRig(lambda: redis_store(server))
