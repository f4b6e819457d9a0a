"""Limits shared through a store: decided in bounded time, open while it is away, exact when it is back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from accounting.events import (
    LimitStoreMissed,
    QuotaDecided,
    QuotaEvent,
    QuotaSettled,
    SettlementsLost,
)
from accounting.keys import Budget, KeyLimits
from accounting.quotas import KeyUsage, QuotaRequest, Quotas, QuotaVerdict, Settlement
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest
from gateway.errors import QuotaExceeded, RateLimited
from gateway.keys.rate_limits import KeyLimiter, TokenReservation
from gateway.keys.shared_limits import LAST_KNOWN_S, MAX_OUTBOX, SharedLimits
from gateway.state.errors import StateUnavailable
from gateway.state.limits_sqlite import SqliteLimitStore

LIMITED = Caller("acme", CallerRole.CALLER, "key_1", limits=KeyLimits(2, 100, 500))
UNLIMITED = Caller("acme", CallerRole.CALLER, "key_2")


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


class FakeStore:
    """A store with one usage for each key; it raises while ``down`` and never answers while ``hangs``."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.tallies: dict[str, KeyUsage] = {}
        self.gone: set[str] = set()
        self.asked = 0
        self.settled: list[Settlement] = []
        self.batches: dict[str, int] = {}
        self.down = False
        self.hangs = False
        self.closed = False

    async def _answers(self) -> None:
        self.asked += 1
        await asyncio.sleep(0)
        if self.hangs:
            await asyncio.Event().wait()
        if self.down:
            raise StateUnavailable("take", "down")

    async def take(
        self, key_id: str, limits: KeyLimits, ask: QuotaRequest, *, fresh: bool
    ) -> QuotaVerdict | None:
        tally = self.tallies.setdefault(key_id, KeyUsage(limits))
        if tally.limits != limits:
            tally = self.tallies[key_id] = KeyUsage(limits, tally.encode())
        if self.hangs:
            # The store has decided, but its answer never comes.
            tally.take(ask, self.clock())
        await self._answers()
        if ask.hold is not None and not fresh and ask.hold.holder in self.gone:
            return None
        return tally.take(ask, self.clock(), alive=lambda holder: holder not in self.gone)

    async def settle(self, sender: str, number: int, settlements: Sequence[Settlement]) -> None:
        await self._answers()
        if number <= self.batches.get(sender, 0):
            return
        self.batches[sender] = number
        for one in settlements:
            self.settled.append(one)
            self.tallies.setdefault(one.key_id, KeyUsage(one.limits)).settle(one, self.clock())

    async def renew(self, holder: str) -> bool:
        await self._answers()
        return holder not in self.gone

    async def close(self) -> None:
        self.closed = True


class Process:
    """The limits of a gateway process over the store; ``timeout_s`` is short for stores that hang."""

    def __init__(self, store: FakeStore, timeout_s: float = 5.0) -> None:
        numbers = itertools.count(1)
        self.events: list[QuotaEvent] = []
        self.shared = SharedLimits(
            store,
            clock=store.clock,
            unix_time=store.clock,
            emit=self.events.append,
            new_holder=lambda: f"{id(self)}.{next(numbers)}",
            timeout_s=timeout_s,
            cool_off_s=0.02,
            settle_every_s=0.001,
            close_timeout_s=0.05,
        )
        self.limiter = KeyLimiter(Quotas(clock=store.clock), self.shared, emit=self.events.append)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as loops:
            task = loops.create_task(self.shared.run())
            yield
            task.cancel()
        await self.shared.close()

    async def enter(self) -> bool:
        try:
            await self.limiter.enter(LIMITED)
        except RateLimited:
            return False
        return True

    async def hold(self, tokens: int, caller: Caller = LIMITED) -> TokenReservation | None:
        request = GenerateRequest("r", "g", caller, contract=Contract.NATIVE, arrived_at=0.0, created=0)
        return await self.limiter.reserve(request.caller, tokens)

    async def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in await self.limiter.headers(LIMITED)}

    def decided(self) -> Counter[bool]:
        return Counter(event.shared for event in self.events if isinstance(event, QuotaDecided))


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(Clock())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)


async def test_a_key_without_limits_sends_no_request_to_the_store(store: FakeStore) -> None:
    one = Process(store)
    async with one.running():
        await one.limiter.enter(UNLIMITED)
        assert await one.hold(10, UNLIMITED) is None
        assert await one.limiter.headers(UNLIMITED) == []
    assert store.asked == 0 and not one.events


async def test_processes_share_what_a_key_may_use(store: FakeStore) -> None:
    one, other = Process(store), Process(store)
    async with one.running(), other.running():
        assert [await one.enter(), await other.enter(), await one.enter()] == [True, True, False]
        held = await one.hold(80)
        with pytest.raises(RateLimited):
            await other.hold(30)
        assert held is not None
        held.settle(20)
        held.settle(99)
        assert (await one.headers())["x-ratelimit-remaining-tokens"] == "80", (
            "told before the store has heard"
        )
        await until(lambda: len(store.settled) == 1)
        again = await other.hold(80)
        assert again is not None
        assert (await other.headers())["x-ratelimit-remaining-tokens"] == "0"
        again.settle(0)
        assert await one.limiter.used(LIMITED.key_id, LIMITED.limits) == {
            "requests_per_minute": 2,
            "tokens_per_minute": 20,
            "tokens_per_day": 20,
        }
    assert QuotaSettled(80, 20) in one.events and store.closed
    assert one.decided() == {True: 3} and other.decided() == {True: 3}


async def test_a_caller_that_hammers_costs_the_store_nothing_until_its_time_has_come(
    store: FakeStore,
) -> None:
    one = Process(store)
    assert [await one.enter() for _ in range(3)] == [True, True, False]
    asked = store.asked
    with pytest.raises(RateLimited) as refused:
        await one.limiter.enter(LIMITED)
    assert refused.value.retry_after_ms == 60_000
    store.clock.now += 30.0
    assert (await one.headers())["x-ratelimit-reset-requests"] == "31s"
    asked = store.asked
    with pytest.raises(RateLimited) as refused:
        await one.limiter.enter(LIMITED)
    assert refused.value.retry_after_ms == 31_000 and store.asked == asked
    store.clock.now += 31.0
    assert await one.enter() and store.asked == asked + 1


async def test_a_refused_caller_passes_as_soon_as_its_limit_is_raised(store: FakeStore) -> None:
    one = Process(store)
    assert [await one.enter() for _ in range(3)] == [True, True, False]
    raised = replace(LIMITED, limits=replace(LIMITED.limits, requests_per_minute=5))
    await one.limiter.enter(raised)
    headers = dict(await one.limiter.headers(raised))
    assert headers[b"x-ratelimit-limit-requests"] == b"5"
    assert headers[b"x-ratelimit-remaining-requests"] == b"2"


async def test_a_raised_limit_is_in_force_though_the_store_is_away_since_then(store: FakeStore) -> None:
    one = Process(store)
    assert [await one.enter() for _ in range(3)] == [True, True, False]
    store.down = True
    await one.limiter.enter(replace(LIMITED, limits=replace(LIMITED.limits, requests_per_minute=3)))


@pytest.mark.parametrize("how", ["down", "hangs"])
async def test_while_the_store_is_away_the_process_goes_on_by_its_own_counts(
    store: FakeStore, how: str
) -> None:
    one = Process(store, timeout_s=0.05)
    async with one.running():
        assert await one.enter()
        setattr(store, how, True)
        assert await one.enter(), "open, within the bound of time"
        assert not await one.enter(), "what the store decided before counts here too"
        held = await one.hold(90)
        with pytest.raises(RateLimited):
            await one.hold(20)
        assert (await one.headers())["x-ratelimit-remaining-requests"] == "0"
        assert held is not None
        held.settle(15)
        missed = [event for event in one.events if isinstance(event, LimitStoreMissed)]
        assert missed and {event.reason for event in missed} == {
            "timeout" if how == "hangs" else "unavailable"
        }
        assert one.decided()[False] >= 3 and one.shared.away

        setattr(store, how, False)
        await until(lambda: not one.shared.away and one.shared.status() == (False, 0))
        assert sum(settlement.used for settlement in store.settled) == 15, "told when it is back"
        store.clock.now += 1.0
        with pytest.raises(RateLimited):
            await one.hold(86)
        last = await one.hold(85)
        assert last is not None
        last.settle(0)


async def test_a_store_that_is_back_is_found_without_a_further_request(store: FakeStore) -> None:
    process = Process(store)
    async with process.running():
        store.down = True
        assert await process.enter() and process.shared.away
        store.down = False
        await until(lambda: not process.shared.away)


@pytest.mark.parametrize("arrives", [True, False])
async def test_what_was_used_counts_once_whether_or_not_the_first_attempt_to_send_it_arrived(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    settle, attempts = store.settle, itertools.count()

    async def fails_once(*batch: Any) -> None:
        first = not next(attempts)
        if arrives or not first:
            await settle(*batch)
        if first:
            raise StateUnavailable("settle", "no connection")

    monkeypatch.setattr(store, "settle", fails_once)
    one = Process(store)
    async with one.running():
        one.shared.settle("k", LIMITED.limits, None, None, 0, 7)
        await until(lambda: bool(store.settled) and one.shared.status() == (False, 0))
    assert sum(settlement.used for settlement in store.settled) == 7


async def test_what_the_store_said_last_holds_while_it_is_fresh_though_another_process_used_it(
    store: FakeStore,
) -> None:
    one, other = Process(store), Process(store)
    async with one.running(), other.running():
        assert await other.hold(60) is not None and await other.enter()
        small = await one.hold(10)
        assert small is not None and await one.enter()
        store.down = True
        assert not await one.enter(), "both requests of the minute are used, one of them elsewhere"
        with pytest.raises(RateLimited) as refused:
            await one.hold(31)
        assert refused.value.retry_after_ms == 1_000
        more = await one.hold(30)
        assert more is not None
        with pytest.raises(RateLimited):
            await one.hold(1)
        more.settle(10)
        with pytest.raises(RateLimited):
            await one.hold(1)
        store.clock.now += LAST_KNOWN_S + 1.0
        assert await one.hold(80) is not None, "what is long ago says nothing; its own counts allow it"
    assert one.decided()[False] == 6


async def test_a_store_that_hangs_is_tried_by_one_request_at_a_time(store: FakeStore) -> None:
    one = Process(store, timeout_s=0.05)
    store.hangs = True
    await one.enter()
    asked = store.asked
    for _ in range(20):
        await one.enter()
    assert store.asked == asked
    store.clock.now += 1.0
    await asyncio.gather(*(one.enter() for _ in range(20)))
    assert store.asked == asked + 1


class OneByOne(FakeStore):
    """A store with one connection; each answer takes 10 ms."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._connection = asyncio.Lock()

    async def _answers(self) -> None:
        async with self._connection:
            await asyncio.sleep(0.01)
            await super()._answers()


async def test_a_request_that_waits_for_this_process_and_not_for_the_store_is_decided_by_the_store() -> None:
    one = Process(OneByOne(Clock()), timeout_s=0.1)
    passed = await asyncio.gather(*(one.enter() for _ in range(50)))
    assert Counter(passed) == {True: 2, False: 48}
    assert one.decided() == {True: 50}, "the last one waits for half a second"


async def test_a_late_event_loop_does_not_make_the_store_one_that_is_away() -> None:
    one = Process(OneByOne(Clock()), timeout_s=0.1)
    asyncio.get_running_loop().call_later(0.005, time.sleep, 0.5)
    assert await one.enter()
    assert one.decided() == {True: 1}


async def test_a_request_that_is_cancelled_while_it_asks_holds_nothing(store: FakeStore) -> None:
    one = Process(store, timeout_s=0.05)
    async with one.running():
        store.hangs = True
        async with asyncio.TaskGroup() as group:
            call = group.create_task(one.hold(100))
            await until(lambda: store.asked == 1)
            call.cancel()
        store.hangs = False
        await until(lambda: one.shared.status() == (False, 0))
        held = await one.hold(100)
        assert held is not None
        held.settle(0)


async def test_a_process_that_lost_its_lease_holds_under_a_new_name(store: FakeStore) -> None:
    one = Process(store)
    async with one.running():
        first = await one.hold(60)
        [holder] = {hold.holder for hold in store.tallies["key_1"]._held}
        store.gone.add(holder)
        second = await one.hold(60)
        assert first is not None and second is not None
        first.settle(10)
        second.settle(20)
        await until(lambda: len(store.settled) == 2)
        assert (await one.headers())["x-ratelimit-remaining-tokens"] == "70"
        third = await one.hold(70)
        assert third is not None
        third.settle(0)


async def test_the_day_is_quota_exceeded_and_the_minute_rate_limited(store: FakeStore) -> None:
    one = Process(store)
    with pytest.raises(QuotaExceeded):
        await one.hold(501, replace(LIMITED, key_id="key_3", limits=KeyLimits(tokens_per_day=500)))
    with pytest.raises(RateLimited):
        await one.hold(101)


async def test_settlements_that_wait_are_bounded_and_those_lost_are_told(store: FakeStore) -> None:
    one = Process(store)
    store.down = True
    for number in range(MAX_OUTBOX + 3):
        one.shared.settle("k", LIMITED.limits, None, None, 0, number + 1)
    assert one.shared.status()[1] == MAX_OUTBOX
    assert [event for event in one.events if isinstance(event, SettlementsLost)] == [SettlementsLost(1)] * 3


async def test_a_store_that_comes_back_while_the_gateway_stops_gets_the_last_settlements(
    store: FakeStore,
) -> None:
    one = Process(store, timeout_s=0.01)
    one.shared.close_timeout_s, store.hangs = 30.0, True
    one.shared.settle("k", LIMITED.limits, None, None, 0, 7)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one.shared.close())
        await until(lambda: one.shared.away)
        store.hangs = False
    assert [settlement.used for settlement in store.settled] == [7] and store.closed


async def test_settlements_that_a_stop_loses_are_logged_and_counted(store: FakeStore) -> None:
    one = Process(store)
    store.down = True
    one.shared.settle("k", LIMITED.limits, None, None, 0, 7)
    with structlog.testing.capture_logs() as logs:
        await one.shared.close()
    assert [line["settlements_lost"] for line in logs if "settlements_lost" in line] == [1]
    assert SettlementsLost(1) in one.events and store.closed


async def test_a_request_that_costs_nothing_lets_no_other_look_dropped(tmp_path: Path) -> None:
    """A store gives no lease for a hold of nothing: the next request then found none, and said so."""
    store, clock, budget = SqliteLimitStore(tmp_path / "limits", unix_time=Clock()), Clock(), Budget(100, 100)
    one = SharedLimits(
        store, clock=clock, unix_time=clock, emit=lambda _: None, new_holder=lambda: "one", timeout_s=30.0
    )
    with structlog.testing.capture_logs() as logs:
        free, _ = await one.hold("usd", budget, 0)
        paid, hold = await one.hold("usd", budget, 60)
        one.settle("usd", budget, hold, paid, 60, 60)
        await one.close()
    assert free is not None and paid is not None and free.excess is paid.excess is None and not logs
