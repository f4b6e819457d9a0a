"""A real Redis that is full, read-only, slow or gone: how keys, revocations, limits and replies behave.

The keys of two gateways follow it in this process; each gateway has its own folder of local copies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from accounting.events import LimitStoreMissed, QuotaEvent
from accounting.keys import KeyLimits
from accounting.quotas import QuotaRequest, Quotas
from gateway.config.state import StateConfig
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import BackendUnavailable, RateLimited
from gateway.http.exchange import Reply
from gateway.http.idempotency import Idempotency
from gateway.keys.rate_limits import KeyLimiter
from gateway.keys.shared_limits import SharedLimits
from gateway.state.limits_redis import RedisLimitStore
from gateway.state.redis_client import connect
from gateway.wiring.state import make_state
from tests.gateway.test_gateway_keys import WHO, Process, running, until
from tests.http.fakes import exchange_of
from tests.state.servers import RedisServer, redis_server

ANSWER = Reply(200, b'{"text": "an answer"}')
ONE_A_MINUTE = Caller("acme", CallerRole.CALLER, "key_one", limits=KeyLimits(requests_per_minute=1))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("refusing"), durable=True) as one:
        yield one


@dataclass
class Site:
    """Two gateways; the limits and stored replies of ``here``; a key that stays valid and one to revoke."""

    here: Process
    other: Process
    limiter: KeyLimiter
    answers: Idempotency
    valid: str
    revoked: str
    revoked_id: str

    async def refused_everywhere(self) -> None:
        await until(lambda: not self.here.knows(self.revoked) and not self.other.knows(self.revoked))
        assert self.here.knows(self.valid) and self.other.knows(self.valid)

    async def ask(self, key: str) -> Reply:
        async def run() -> Reply:
            return ANSWER

        return await self.answers.answer(exchange_of("acme"), key, "print", run, lambda: True)


def process(server: RedisServer, folder: Path) -> Process:
    config = StateConfig(url=server.url, cache_dir=str(folder), poll_seconds=0.2)
    return Process(make_state(config, clock=time.monotonic, unix_time=time.time))


@asynccontextmanager
async def site(server: RedisServer, folder: Path) -> AsyncIterator[Site]:
    server.flush()
    here, other = process(server, folder / "here"), process(server, folder / "other")
    shared = SharedLimits(
        RedisLimitStore(connect(server.url), namespace="default"),
        clock=time.monotonic,
        unix_time=time.time,
        emit=lambda event: None,
        new_holder=lambda: "gw_1",
        timeout_s=0.2,
    )
    try:
        async with running(here, other):
            valid, revoked = await here.create(), await here.create()
            await until(lambda: other.knows(revoked["key"]))
            answers = Idempotency(here.state.idempotency, wait_s=30.0)
            limiter = KeyLimiter(Quotas(clock=time.monotonic), shared)
            at = Site(here, other, limiter, answers, valid["key"], revoked["key"], revoked["id"])
            assert not (await at.ask("before")).headers
            yield at
    finally:
        await shared.close()


async def test_a_full_redis_takes_keys_and_revocations_and_no_answers(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis.Redis.from_url(server.url) as client:
        async with site(server, tmp_path) as at:
            client.set("filler", b"x" * 3_000_000)
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1mb")
            try:
                with pytest.raises(redis.exceptions.OutOfMemoryError):
                    client.set("one", "more")
                made = await at.here.create()
                await until(lambda: at.other.knows(made["key"]))
                await at.here.admin.revoke(at.revoked_id, who=WHO)
                await at.refused_everywhere()
                assert at.here.state.store.healthy
                assert (await at.ask("full")).body == ANSWER.body
                assert "put failed (OutOfMemoryError)" in caplog.text
                assert (await at.ask("before")).headers, "what was stored is found"
                await at.limiter.enter(ONE_A_MINUTE)
                with pytest.raises(RateLimited):
                    await at.limiter.enter(ONE_A_MINUTE)
            finally:
                client.config_set("maxmemory", "0")
                client.delete("filler")


async def test_what_was_used_while_redis_was_full_counts_when_it_is_no_longer_full(
    server: RedisServer,
) -> None:
    events: list[QuotaEvent] = []
    shared = SharedLimits(
        RedisLimitStore(connect(server.url), namespace="full"),
        clock=time.monotonic,
        unix_time=time.time,
        emit=events.append,
        new_holder=lambda: "gw_1",
        cool_off_s=0.02,
        settle_every_s=0.001,
    )
    limiter = KeyLimiter(Quotas(clock=time.monotonic), shared)
    limits = KeyLimits(tokens_per_day=1000)
    caller = Caller("acme", CallerRole.CALLER, "key_day", limits=limits)
    with redis.Redis.from_url(server.url) as client:
        async with asyncio.TaskGroup() as loops:
            running = loops.create_task(shared.run())
            before = await limiter.reserve(caller, 100)
            client.config_set("maxmemory", "1")
            try:
                meanwhile = await limiter.reserve(caller, 100)
                for held, used in ((before, 10), (meanwhile, 5)):
                    assert held is not None
                    held.settle(used)
                missed = len(events)
                await until(lambda: sum(isinstance(one, LimitStoreMissed) for one in events[missed:]) > 2)
                assert shared.away, "no renewal succeeds meanwhile"
            finally:
                client.config_set("maxmemory", "0")
            await until(lambda: shared.status() == (False, 0))
            verdict = await shared.store.take("key_day", limits, QuotaRequest(), fresh=True)
            assert verdict is not None and verdict.figures[2] is not None
            assert verdict.figures[2].remaining == 1000 - 15
            running.cancel()
    await shared.close()


async def test_a_read_only_redis_tells_of_a_revocation_and_takes_it_when_it_can(
    server: RedisServer, tmp_path: Path
) -> None:
    with redis.Redis.from_url(server.url) as client:
        async with site(server, tmp_path) as at:
            client.replicaof("127.0.0.1", 1)
            try:
                with pytest.raises(BackendUnavailable, match=r"not stored.*ReadOnlyError.*refuses the key"):
                    await at.here.admin.revoke(at.revoked_id, who=WHO)
                assert not at.here.knows(at.revoked)
                await at.refused_everywhere()
                with pytest.raises(BackendUnavailable):
                    await at.here.create()
                assert at.here.state.store.healthy, "it is read"
                assert (await at.ask("before")).headers
                assert (await at.ask("read-only")).body == ANSWER.body
                await at.limiter.enter(ONE_A_MINUTE)
            finally:
                client.replicaof("no", "one")
            late = process(server, tmp_path / "late")
            async with running(late):
                await until(lambda: late.knows(at.valid) and not late.knows(at.revoked))


async def test_a_redis_that_does_not_answer_holds_up_no_caller_with_a_known_key(
    server: RedisServer, tmp_path: Path
) -> None:
    with redis.Redis.from_url(server.url) as client:
        async with site(server, tmp_path) as at:
            client.client_pause(60_000, all=False)  # a pause of reads could not be ended
            try:
                revoking = asyncio.gather(
                    at.here.admin.revoke(at.revoked_id, who=WHO), at.ask("slow"), return_exceptions=True
                )
                await until(lambda: not at.here.knows(at.revoked))
                assert not revoking.done(), "refused before the store was asked"
                assert at.here.knows(at.valid)
                await at.limiter.enter(ONE_A_MINUTE)
                with pytest.raises(RateLimited):
                    await at.limiter.enter(ONE_A_MINUTE)
                revoked, answered = await revoking
                assert isinstance(revoked, BackendUnavailable) and answered == ANSWER
            finally:
                client.client_unpause()
            await at.refused_everywhere()


async def test_a_redis_that_is_gone_gets_the_revocation_when_it_is_back(
    server: RedisServer, tmp_path: Path
) -> None:
    async with site(server, tmp_path) as at:
        server.kill()
        try:
            with pytest.raises(BackendUnavailable, match="refuses the key from now on"):
                await at.here.admin.revoke(at.revoked_id, who=WHO)
            assert not at.here.knows(at.revoked) and at.here.knows(at.valid)
            neighbour = process(server, tmp_path / "here")
            async with running(neighbour):
                assert not neighbour.knows(at.revoked), "by the note on its machine"
            with pytest.raises(BackendUnavailable):
                await at.ask("gone")
            await at.limiter.enter(ONE_A_MINUTE)
            assert at.other.knows(at.revoked), "nothing that it reaches knows of it"
        finally:
            server.start()
        await at.refused_everywhere()


async def test_a_redis_that_comes_back_empty_tells_of_the_revocation_all_the_same(
    server: RedisServer, tmp_path: Path
) -> None:
    async with site(server, tmp_path) as at:
        server.flush()
        # The applied records stay in force, and no new ones: a change needs an operator.
        with pytest.raises(BackendUnavailable, match="does not follow the state store"):
            await at.here.admin.revoke(at.revoked_id, who=WHO)
        await at.refused_everywhere()
