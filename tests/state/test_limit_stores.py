"""Key limits shared by processes: Redis' scripts and the SQLite file decide as ``KeyUsage`` does."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import msgspec
import pytest
import redis

from accounting.keys import Budget, KeyLimits
from accounting.quotas import LIMITS, RETRY_HELD_S, HoldId, KeyUsage, QuotaRequest, QuotaVerdict, Settlement
from gateway.state.errors import StateUnavailable
from gateway.state.limits import LEASE_S, LimitStore
from gateway.state.limits_redis import RedisLimitStore
from gateway.state.limits_sqlite import SqliteLimitStore
from gateway.state.redis_client import connect
from tests.state.servers import RedisServer

ALL = KeyLimits(requests_per_minute=5, tokens_per_minute=100, tokens_per_day=1_000)
BIG = 10**15


class Stores:
    """The stores of two processes over the same data."""

    def __init__(self, one: LimitStore, other: LimitStore) -> None:
        self.one = one
        self.other = other

    def let_lapse(self, holder: str) -> None:
        """End a holder's lease."""
        self.lease(holder, time.time() - 1.0)

    def lease(self, holder: str, changed: float | None = None) -> float:
        """When a holder's lease ends, which ``changed`` replaces."""
        raise AssertionError("each kind has its own")

    def set_back(self, hours: int) -> None:
        """Move what key ``k`` has used, as if the clock had been set back since."""
        windows, held = msgspec.msgpack.decode(self.account())
        for kind, steps in zip(LIMITS, windows, strict=True):
            for step in steps:
                step[0] += hours * 3_600 // kind.step_s
        self.account(msgspec.msgpack.encode([windows, held]))

    def account(self, changed: bytes | None = None) -> bytes:
        """What is stored of key ``k``, which ``changed`` replaces."""
        raise AssertionError("each kind has its own")


class OnRedis(Stores):
    def __init__(self, server: RedisServer) -> None:
        self._server = server
        super().__init__(*(RedisLimitStore(connect(server.url), namespace="test") for _ in range(2)))

    def lease(self, holder: str, changed: float | None = None) -> float:
        with redis.Redis.from_url(self._server.url) as client:
            if changed is not None:
                client.zadd("sluice:{test}:limit-holders", {holder: changed})
            ends_at: float = client.zscore("sluice:{test}:limit-holders", holder)
            return ends_at

    def account(self, changed: bytes | None = None) -> bytes:
        with redis.Redis.from_url(self._server.url) as client:
            if changed is not None:
                client.set("sluice:{test}:limit:k", changed)
            stored: bytes = client.get("sluice:{test}:limit:k")
            return stored


class OnSqlite(Stores):
    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(*(SqliteLimitStore(path, unix_time=time.time) for _ in range(2)))

    def lease(self, holder: str, changed: float | None = None) -> float:
        with sqlite3.connect(self._path) as connection:
            if changed is not None:
                connection.execute("UPDATE limit_holders SET lease = ? WHERE holder = ?", (changed, holder))
            [[ends_at]] = connection.execute("SELECT lease FROM limit_holders WHERE holder = ?", (holder,))
            return float(ends_at)

    def account(self, changed: bytes | None = None) -> bytes:
        with sqlite3.connect(self._path) as connection:
            if changed is not None:
                connection.execute("UPDATE limit_tallies SET kept = ?", (changed,))
            [[stored]] = connection.execute("SELECT kept FROM limit_tallies")
            return bytes(stored)


@pytest.fixture(params=["redis", "sqlite"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    found: Stores
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("one_redis")
        server.flush()
        found = OnRedis(server)
    else:
        found = OnSqlite(tmp_path / "limits")
    yield found
    await found.one.close()
    await found.other.close()


def tokens(amount: int, holder: str = "p1", number: int = 1) -> QuotaRequest:
    return QuotaRequest(tokens=amount, hold=HoldId(holder, number))


async def take(
    store: LimitStore, ask: QuotaRequest, limits: KeyLimits = ALL, key: str = "k", fresh: bool = True
) -> QuotaVerdict:
    verdict = await store.take(key, limits, ask, fresh=fresh)
    assert verdict is not None
    return verdict


def remaining(verdict: QuotaVerdict) -> list[int | None]:
    return [None if one is None else one.remaining for one in verdict.figures]


async def test_two_processes_share_one_count_of_requests(stores: Stores) -> None:
    verdicts = [
        await take(store, QuotaRequest(requests=1)) for _ in range(3) for store in (stores.one, stores.other)
    ]
    assert [one.excess is None for one in verdicts] == [True] * 5 + [False]
    assert remaining(verdicts[-1]) == [0, 100, 1_000]
    excess = verdicts[-1].excess
    assert excess is not None and excess.name == "requests_per_minute" and excess.asked == 1
    assert excess.wait_s is not None and 30 < excess.wait_s <= 61
    figures = verdicts[-1].figures[0]
    assert figures is not None and 30 < figures.reset_s <= 61


async def test_when_the_clock_was_set_back_by_hours_what_was_used_leaves_its_window_as_if_used_now(
    stores: Stores,
) -> None:
    for number in range(5):
        await take(stores.one, QuotaRequest(requests=1))
        held = tokens(10, number=number)
        await take(stores.one, held)
        await stores.one.settle("p1", number + 1, [Settlement("k", ALL, held.hold, None, 10)])
    stores.set_back(5)
    refused = await take(stores.other, QuotaRequest(requests=1))
    assert remaining(refused) == [0, 50, 950]
    assert refused.excess is not None and 30 < (refused.excess.wait_s or 0) <= 61
    assert [one.reset_s <= 61 for one in refused.figures[:2] if one is not None] == [True, True]
    await stores.one.settle("p1", 9, [Settlement("k", ALL, None, None, 20)])
    assert remaining(await take(stores.other, QuotaRequest())) == [0, 30, 930]


async def test_tokens_that_one_process_holds_are_not_available_to_another(stores: Stores) -> None:
    assert remaining(await take(stores.one, tokens(70))) == [5, 30, 930]
    refused = await take(stores.other, tokens(40, "p2"))
    assert refused.excess is not None and refused.excess.name == "tokens_per_minute"
    assert refused.excess.wait_s == RETRY_HELD_S, "it may be given back at any moment"
    at = (await take(stores.one, QuotaRequest())).at
    await stores.one.settle("p1", 1, [Settlement("k", ALL, HoldId("p1", 1), at, 20)])
    assert remaining(await take(stores.other, tokens(40, "p2"))) == [5, 40, 940]
    used_up = await take(stores.other, tokens(85, "p2", 2))
    assert used_up.excess is not None and used_up.excess.wait_s is not None
    assert 30 < used_up.excess.wait_s <= 61, "what was used leaves the window then"


async def test_a_batch_of_settlements_that_is_repeated_counts_once_with_or_without_a_hold(
    stores: Stores,
) -> None:
    await take(stores.one, tokens(70))
    budget = Budget(1_000, 1_000)
    batch = [
        Settlement("k", ALL, HoldId("p1", 1), None, 20),
        Settlement("k", ALL, HoldId("lapsed", 1), None, 3),
        Settlement("k", ALL, None, None, 4),
        Settlement("usd", budget, None, None, 5),
    ]
    for number, store in ((7, stores.one), (7, stores.one), (7, stores.other), (6, stores.one)):
        await store.settle("p1", number, batch)
    await stores.other.settle("p2", 7, batch[-1:])
    assert remaining(await take(stores.one, QuotaRequest())) == [5, 73, 973]
    spent = await stores.one.take("usd", budget, QuotaRequest(), fresh=True)
    assert spent is not None and remaining(spent) == [None, 990, 990]


async def test_use_without_a_hold_is_counted_afterwards(stores: Stores) -> None:
    now = int(time.time())
    await stores.one.settle(
        "p1",
        1,
        [
            Settlement("k", ALL, None, now, 30),
            Settlement("k", ALL, None, now - 10, 5),
            Settlement("k", ALL, None, now - 90, 15),
        ],
    )
    assert remaining(await take(stores.one, QuotaRequest())) == [5, 65, 950]


async def test_the_holds_of_a_crashed_process_are_free_when_its_lease_ends(stores: Stores) -> None:
    await take(stores.one, tokens(100))
    assert (await take(stores.other, tokens(100, "p2"))).excess is not None
    stores.let_lapse("p1")
    assert remaining(await take(stores.other, tokens(100, "p2"))) == [5, 0, 900]


async def test_the_lease_of_a_crashed_process_ends_soon_although_the_clock_was_set_back_since(
    stores: Stores,
) -> None:
    await take(stores.one, tokens(100))
    stores.lease("p1", time.time() + 3_600)
    assert (await take(stores.other, tokens(100, "p2"))).excess is not None
    assert stores.lease("p1") <= time.time() + LEASE_S


async def test_a_lease_that_was_lost_is_not_taken_up_again_while_something_is_held(stores: Stores) -> None:
    await take(stores.one, tokens(10))
    assert await stores.one.renew("p1") and not await stores.one.renew("unknown")
    stores.let_lapse("p1")
    assert await stores.one.take("k", ALL, tokens(10, "p1", 2), fresh=False) is None
    assert not await stores.one.renew("p1")
    assert (await take(stores.one, tokens(10, "p1", 3))).excess is None


async def test_a_look_changes_nothing_and_keys_share_nothing(stores: Stores) -> None:
    for _ in range(3):
        assert remaining(await take(stores.one, QuotaRequest(), key="other")) == [5, 100, 1_000]
    await take(stores.one, QuotaRequest(requests=1))
    assert remaining(await take(stores.one, QuotaRequest(), key="other")) == [5, 100, 1_000]


async def test_limits_may_be_as_large_as_admins_may_set_them(stores: Stores) -> None:
    limits = KeyLimits(tokens_per_minute=BIG, tokens_per_day=BIG)
    await take(stores.one, tokens(BIG - 1), limits)
    assert remaining(await take(stores.one, QuotaRequest(), limits)) == [None, 1, 1]
    too_many = await take(stores.one, tokens(2, number=2), limits)
    assert too_many.excess is not None
    never = await take(stores.one, tokens(BIG + 1, number=3), limits)
    assert never.excess is not None and never.excess.wait_s is None


async def test_a_store_decides_at_any_moment_as_the_plain_tally_does(stores: Stores) -> None:
    """The store and ``KeyUsage`` get the same random calls; the store uses its own clock."""
    random, tally, held = Random(5), KeyUsage(ALL), dict[HoldId, int]()
    apart_s = 1.1  # the tally is called after the store, and times are whole seconds
    for number in range(300):
        began = time.time()
        if held and random.random() < 0.4:
            hold, amount = held.popitem()
            settlement = Settlement("k", ALL, hold, None, random.randint(0, amount))
            await random.choice((stores.one, stores.other)).settle("p1", number, [settlement])
            tally.settle(settlement, time.time())
            apart_s = max(apart_s, 1.1 + time.time() - began)
            continue
        ask = random.choice(
            (
                QuotaRequest(requests=1),
                tokens(random.randint(1, 60), random.choice(("p1", "p2")), number),
                QuotaRequest(),
            )
        )
        verdict = await take(random.choice((stores.one, stores.other)), ask)
        expected = tally.take(ask, time.time())
        apart_s = max(apart_s, 1.1 + time.time() - began)
        assert remaining(verdict) == remaining(expected)
        assert (verdict.excess is None) == (expected.excess is None)
        if verdict.excess is not None and expected.excess is not None:
            assert verdict.excess.name == expected.excess.name
            if expected.excess.wait_s is not None and verdict.excess.wait_s is not None:
                assert abs(expected.excess.wait_s - verdict.excess.wait_s) < 2 * apart_s
        for one, other in zip(verdict.figures, expected.figures, strict=True):
            assert one is not None and other is not None and abs(one.reset_s - other.reset_s) < 2 * apart_s
        if ask.hold is not None and verdict.excess is None:
            held[ask.hold] = ask.tokens


async def test_a_budget_is_one_account_for_all_processes_whose_months_use_stays(stores: Stores) -> None:
    budget = Budget(nanousd_per_day=10**12, nanousd_per_month=100)

    async def hold(store: LimitStore, amount: int, number: int) -> QuotaVerdict:
        verdict = await store.take("usd", budget, tokens(amount, number=number), fresh=True)
        assert verdict is not None
        return verdict

    assert remaining(await hold(stores.one, 70, 1)) == [None, 10**12 - 70, 30]
    refused = await hold(stores.other, 40, 2)
    assert refused.excess is not None and refused.excess.name == "usd_per_month"
    assert refused.excess.wait_s == RETRY_HELD_S, "it may be given back at any moment"
    await take(stores.one, tokens(60))
    long_ago = int(time.time()) - 3 * 86_400
    await stores.one.settle(
        "p1",
        1,
        [
            Settlement("usd", budget, HoldId("p1", 1), None, 20),
            Settlement("usd", budget, None, long_ago, 50),
            Settlement("k", ALL, HoldId("p1", 1), None, 10),
        ],
    )
    assert remaining(await hold(stores.other, 0, 3)) == [None, 10**12 - 20, 30], "the day has forgotten"
    assert remaining(await take(stores.other, QuotaRequest())) == [5, 90, 990]
    used_up = await hold(stores.other, 40, 4)
    assert used_up.excess is not None and used_up.excess.wait_s is not None
    assert used_up.excess.wait_s > RETRY_HELD_S


async def test_what_was_used_counts_under_changed_limits_too(stores: Stores) -> None:
    fewer = KeyLimits(requests_per_minute=3)
    await take(stores.one, QuotaRequest(requests=1))
    await take(stores.one, tokens(60))
    assert remaining(await take(stores.other, QuotaRequest(requests=1), fewer)) == [1, None, None]
    await stores.other.settle("p2", 1, [Settlement("k", fewer, HoldId("p1", 2), None, 0)])
    await stores.one.settle("p1", 1, [Settlement("k", ALL, HoldId("p1", 1), None, 20)])
    assert remaining(await take(stores.one, QuotaRequest())) == [3, 80, 980]


async def test_many_at_once_never_go_beyond_the_limits(stores: Stores) -> None:
    async def ask(number: int) -> bool:
        store = (stores.one, stores.other)[number % 2]
        return (await take(store, tokens(7, f"p{number % 2}", number))).excess is None

    passed = await asyncio.gather(*(ask(number) for number in range(60)))
    assert sum(passed) == 14


async def test_a_store_that_is_away_says_so(tmp_path: Path, one_redis: RedisServer) -> None:
    nowhere = RedisLimitStore(connect("redis://127.0.0.1:1/0"), namespace="test")
    no_folder = SqliteLimitStore(tmp_path / "missing" / "limits", unix_time=time.time)
    for store in (nowhere, no_folder):
        with pytest.raises(StateUnavailable):
            await store.take("k", ALL, QuotaRequest(requests=1), fresh=True)
        with pytest.raises(StateUnavailable):
            await store.settle("p1", 1, [Settlement("k", ALL, None, 1, 1)])
        await store.close()


async def test_a_file_that_is_taken_away_is_made_anew(tmp_path: Path) -> None:
    store = SqliteLimitStore(tmp_path / "limits", unix_time=time.time)
    await take(store, QuotaRequest(requests=1))
    for file in tmp_path.iterdir():  # noqa: ASYNC240 - three small files
        file.unlink()
    assert remaining(await take(store, QuotaRequest(requests=1))) == [4, 100, 1_000]
    await store.close()


async def test_a_file_that_is_damaged_is_thrown_away_and_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "limits"
    path.write_bytes(b"no database at all" * 500)
    store = SqliteLimitStore(path, unix_time=time.time)
    with pytest.raises(StateUnavailable):
        await take(store, QuotaRequest(requests=1))
    assert remaining(await take(store, QuotaRequest(requests=1))) == [4, 100, 1_000]
    await store.close()


def test_a_lease_lasts_longer_than_a_process_may_stand_still() -> None:
    assert LEASE_S >= 10 and len(LIMITS) == 3
