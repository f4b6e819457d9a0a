"""What only a real Redis can show: kills, restarts, refused logins, evictions."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ReadOnlyError
from structlog.testing import capture_logs

from gateway.state.errors import StateUnavailable
from gateway.state.projection import ProjectionState
from gateway.state.redis_client import ask, connect, prefix
from gateway.state.redis_store import RedisStateStore
from gateway.state.stream_follower import StreamFollower
from tests.state.conftest import redis_store, until, until_done
from tests.state.servers import RedisServer, free_port, redis_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as running:
        yield running


async def test_after_a_restart_no_idle_connection_of_before_fails_a_command(server: RedisServer) -> None:
    store = redis_store(server)
    await store.append("s", b"1", author="ann")
    # Concurrent commands open as many connections.
    await asyncio.gather(*(store.read("s") for _ in range(8)))
    await asyncio.to_thread(server.kill)
    with pytest.raises(StateUnavailable):
        await store.heads()
    await asyncio.to_thread(server.start)
    for _ in range(3):
        found = await asyncio.gather(*(store.read("s") for _ in range(8)))
        assert [[record.data for record in one] for one in found] == [[b"1"]] * 8
    await store.close()


async def test_a_failover_moves_the_gateway_though_the_demoted_server_keeps_its_connections_open(
    server: RedisServer, tmp_path: Path
) -> None:
    leads_to = [server.port]

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", leads_to[0])
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    with redis_server(tmp_path / "promoted") as promoted:
        async with await asyncio.start_server(lead, "127.0.0.1", 0) as balancer:
            url = f"redis://127.0.0.1:{balancer.sockets[0].getsockname()[1]}/0"
            store = RedisStateStore(connect(url), shown=url, namespace="sluice", unix_time=time.time)
            cache = connect(url)
            await asyncio.gather(*(store.append("s", b"1", author="ann") for _ in range(8)))
            await cache.set("answer", "before")
            leads_to[0] = promoted.port
            async with Redis(host="127.0.0.1", port=server.port) as demoted:
                await demoted.replicaof("127.0.0.1", promoted.port)
            with pytest.raises(StateUnavailable):
                await store.append("s", b"2", author="ann")
            with pytest.raises(ReadOnlyError):
                await cache.set("answer", "lost")
            await asyncio.gather(*(store.append("s", b"3", author="ann") for _ in range(8)))
            await cache.set("answer", "after")
            async with Redis(host="127.0.0.1", port=promoted.port) as client:
                assert await client.llen("sluice:{sluice}:stream:s") == 8
                assert await client.get("answer") == b"after"
            await store.close()
            await cache.aclose()


async def bgsave(client: Redis, status: str) -> None:
    await client.bgsave()
    async with asyncio.timeout(30):
        while (found := await client.info("persistence"))["rdb_bgsave_in_progress"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert found["rdb_last_bgsave_status"] == status


@pytest.mark.parametrize("why", ["READONLY", "NOREPLICAS", "MISCONF"])
async def test_a_redis_that_takes_no_writes_is_shown_until_it_takes_them_again_though_it_is_read(
    server: RedisServer, why: str
) -> None:
    store, snapshot = redis_store(server), server.folder / "dump.rdb"
    await store.append("s", b"1", author="ann")
    async with Redis(host="127.0.0.1", port=server.port) as client, asyncio.TaskGroup() as group:
        task = group.create_task(store.run())
        with capture_logs() as logs:
            if why == "READONLY":
                await client.replicaof("127.0.0.1", 1)
            elif why == "NOREPLICAS":
                await client.config_set("min-replicas-to-write", 1)
            else:
                snapshot.mkdir()  # no snapshot can be written
                await client.config_set("save", "900 1")
                await bgsave(client, "err")
            with pytest.raises(StateUnavailable):
                await store.append("s", b"2", author="ann")
            for _ in range(30):
                await asyncio.sleep(0.01)
                assert store.healthy and store.refuses_writes
            if why == "READONLY":
                await client.replicaof("no", "one")
            elif why == "NOREPLICAS":
                await client.config_set("min-replicas-to-write", 0)
            else:
                snapshot.rmdir()
                await bgsave(client, "ok")
            await until(lambda: not store.refuses_writes and len(logs) == 2)
        task.cancel()
    assert [line["event"].partition(";")[0] for line in logs] == [
        "state store is unreachable",
        "state store is back",
    ]
    await store.close()


async def test_killed_and_restarted_during_appends_nothing_acknowledged_is_lost_and_all_catch_up(
    server: RedisServer,
) -> None:
    store, watching = redis_store(server), redis_store(server)
    seen: list[bytes] = []
    follower = StreamFollower(
        watching, "s", lambda record: seen.append(record.data), copy=None, clock=time.monotonic
    )
    rng = random.Random(7)
    await follower.start()
    acknowledged: list[tuple[int, bytes]] = []
    refused = 0
    with capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(watching.run()), group.create_task(follower.run())]
            for round_ in range(3):
                kill_at = rng.randrange(5, 30)
                for number in range(40):
                    data = f'"{round_}-{number}"'.encode()
                    if number == kill_at:
                        kill = group.create_task(asyncio.to_thread(server.kill))
                    try:
                        record = await store.append("s", data, author="ann")
                    except StateUnavailable as error:
                        assert "s3cret" not in str(error)
                        refused += 1
                    else:
                        acknowledged.append((record.number, data))
                await kill
                with pytest.raises(StateUnavailable):
                    await store.append("s", b'"late"', author="ann")
                assert not store.healthy
                await asyncio.to_thread(server.start)
                await until_done(lambda: _reached(store))
            kept = await store.read("s")
            assert await follower.caught_up_to(kept[-1].number, 10.0)
            await until(lambda: follower.state is ProjectionState.FOLLOWING and store.healthy)
            for task in loops:
                task.cancel()
    assert refused > 0 and len(acknowledged) > 20
    assert [record.number for record in kept] == list(range(1, len(kept) + 1))
    assert all(kept[number - 1].data == data for number, data in acknowledged)
    assert seen == [record.data for record in kept], "each once, in order, through three restarts"
    assert follower.state is ProjectionState.FOLLOWING
    assert sum("state store is unreachable" in line["event"] for line in logs) <= 6, "not at every poll"
    await store.close()
    await watching.close()


async def _reached(store: RedisStateStore) -> bool:
    with contextlib.suppress(StateUnavailable):
        await store.heads()
    return store.healthy


async def test_a_stream_that_was_evicted_in_part_takes_no_further_record(one_redis: RedisServer) -> None:
    one_redis.flush()
    store = redis_store(one_redis)
    await store.append("s", b"1", author="ann")
    async with Redis.from_url(one_redis.url) as client:
        await client.delete(f"{prefix('test')}stream:s")
    with pytest.raises(StateUnavailable, match="damaged"):
        await store.append("s", b"2", author="ann")
    await store.close()


async def test_namespaces_share_a_server_and_nothing_else(one_redis: RedisServer) -> None:
    one_redis.flush()
    one = redis_store(one_redis)
    other = RedisStateStore(connect(one_redis.url), shown="redis", namespace="other", unix_time=time.time)
    await one.append("s", b"1", author="ann")
    assert dict(await other.heads()) == {} and list(await other.read("s")) == []
    await one.close()
    await other.close()


async def test_a_wrong_password_is_an_absence_that_shows_neither_password(one_redis: RedisServer) -> None:
    url = one_redis.url.replace("s3cret", "wr0ng")
    store = RedisStateStore(connect(url), shown="redis://here", namespace="test", unix_time=time.time)
    with capture_logs() as logs, pytest.raises(StateUnavailable, match="AuthenticationError") as caught:
        await store.append("s", b"1", author="ann")
    printed = f"{caught.value}{logs}"
    assert "wr0ng" not in printed and "s3cret" not in printed and store.healthy is False
    await store.close()


async def test_a_server_that_accepts_and_says_nothing_is_away_within_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.state.redis_client.TIMEOUT_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    port = free_port()
    async with await asyncio.start_server(silent, "127.0.0.1", port):
        url = f"redis://127.0.0.1:{port}"
        store = RedisStateStore(connect(url), shown=url, namespace="n", unix_time=time.time)
        begun = time.monotonic()
        with pytest.raises(StateUnavailable):
            await store.append("s", b"1", author="ann")
        assert time.monotonic() - begun < 15.0, "it says nothing for ever"
        await store.close()


async def test_a_loop_that_is_cancelled_at_any_moment_ends(one_redis: RedisServer) -> None:
    for turns in range(40):
        store = redis_store(one_redis)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            task = group.create_task(store.run())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        await store.close()


async def test_a_command_is_answered_in_a_task_whose_group_has_failed() -> None:
    async def fails() -> None:
        raise ValueError

    async def command() -> bytes:
        return b"an answer"

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(fails())
    client: Any = None
    assert await ask(client, "get", command()) == b"an answer"


async def test_a_connection_that_closes_before_the_command_is_written_is_an_absence() -> None:
    async def command() -> bytes:  # what uvloop raises; it would end the loops of limits, and the gateway
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    client: Any = None
    with pytest.raises(StateUnavailable, match="RuntimeError"):
        await ask(client, "renew", command())


async def test_an_append_whose_connection_breaks_is_not_sent_again(tmp_path: Path) -> None:
    """A command that the Redis client itself repeats would be appended twice."""
    sent: list[bytes] = []

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if b"EVAL" in data:
                sent.append(data)
                break
            writer.write(b"+OK\r\n" * data.count(b"*"))
        writer.close()

    port = free_port()
    async with await asyncio.start_server(broken, "127.0.0.1", port):
        url = f"redis://127.0.0.1:{port}?protocol=2"
        store = RedisStateStore(connect(url), shown=url, namespace="n", unix_time=time.time)
        with pytest.raises(StateUnavailable):
            await store.append("s", b"1", author="ann")
        await store.close()
    assert len(sent) == 1
