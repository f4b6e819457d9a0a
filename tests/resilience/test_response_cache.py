"""The response cache answers the same question, and its failures never fail a request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from resilience.response_cache import REST_S, ResponseCache, digest_of
from resilience.response_cache_memory import MemoryStore
from resilience.response_cache_values import (
    AnswersLost,
    CachedAnswer,
    CacheEvent,
    LookedUp,
    Lookup,
    StoreBroke,
    StoredAnswer,
    StoreError,
    StoreIsBack,
)

ANSWER = CachedAnswer("Kentaro Miura.", "stop")


class Flaky(MemoryStore):
    """A store that can be broken, and that can hang."""

    broken = False
    hangs = False
    asked = 0

    async def get(self, key: str) -> StoredAnswer | None:
        self.asked += 1
        await self._trouble()
        return await super().get(key)

    async def put(self, entries: Sequence[StoredAnswer]) -> None:
        await self._trouble()
        await super().put(entries)

    async def _trouble(self) -> None:
        if self.broken:
            raise StoreError("ConnectionError")
        if self.hangs:
            await asyncio.Event().wait()


@dataclass
class House:
    """A cache over a store that can fail, a clock set by hand, and its events."""

    outbox: int = 100
    timeout_s: float = 30.0
    now: float = 0.0
    events: list[CacheEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = Flaky(capacity=100, max_bytes=1 << 20, ttl_s=900.0, clock=lambda: self.now)
        self.cache = ResponseCache(
            self.store,
            clock=lambda: self.now,
            emit=self.events.append,
            timeout_s=self.timeout_s,
            outbox=self.outbox,
        )

    async def remember(self, text: str, kept: CachedAnswer = ANSWER) -> None:
        self.cache.remember(lambda: question(text), kept)
        await self.cache.flush()

    @property
    def kinds(self) -> list[Lookup]:
        return [event.kind for event in self.events if isinstance(event, LookedUp)]


def question(text: str) -> str:
    return digest_of([text])


async def test_the_same_question_is_answered_and_told_as_the_same() -> None:
    house = House()
    await house.remember("Who created Berserk?")
    assert await house.cache.find(question("Who created Berserk?")) == ANSWER
    assert house.kinds == [Lookup.EXACT]


async def test_another_question_gets_no_stored_answer() -> None:
    house = House()
    await house.remember("Who created Berserk?")
    assert await house.cache.find(question("Who made Berserk?")) is None
    assert house.kinds == [Lookup.MISS]


async def test_questions_are_made_in_another_thread() -> None:
    house = House()
    threads = []

    def ask() -> str:
        threads.append(threading.get_ident())
        return question("Who created Berserk?")

    house.cache.remember(ask, ANSWER)
    assert threads == []
    await house.cache.flush()
    assert threads and threading.get_ident() not in threads


async def test_what_does_not_fit_into_the_outbox_is_lost_and_counted() -> None:
    house = House(outbox=2)
    for n in range(5):
        house.cache.remember(lambda n=n: question(f"CacheQuestion {n}"), ANSWER)  # type: ignore[misc]
    assert house.cache.waiting == 2
    assert house.events == [AnswersLost(1, "outbox_full")] * 3


async def test_the_loop_keeps_what_is_remembered_while_it_runs() -> None:
    house = House()
    async with asyncio.TaskGroup() as loops:
        loop = loops.create_task(house.cache.run())
        for n in range(3):
            house.cache.remember(lambda n=n: question(f"CacheQuestion {n}"), ANSWER)  # type: ignore[misc]
            for _ in range(5_000):
                if house.store.figures().entries == n + 1:
                    break
                await asyncio.sleep(0.001)
            assert house.store.figures().entries == n + 1
        loop.cancel()


async def test_a_broken_store_is_a_miss_told_once_and_left_alone_for_a_while() -> None:
    house = House()
    house.store.broken = True
    for _ in range(3):
        assert await house.cache.find(question("Who created Berserk?")) is None
    assert house.store.asked == 1
    assert house.kinds == [Lookup.ERROR] * 3
    assert [event for event in house.events if isinstance(event, StoreBroke)] == [
        StoreBroke("ConnectionError")
    ]
    house.now = REST_S
    house.store.broken = False
    assert await house.cache.find(question("Who created Berserk?")) is None
    assert house.events[-2:] == [StoreIsBack(), LookedUp(Lookup.MISS)]


async def test_answers_that_a_broken_store_cannot_take_are_lost_and_counted() -> None:
    house = House()
    house.store.broken = True
    await house.remember("Who created Berserk?")
    await house.remember("Who created Bleach?")
    assert house.events == [StoreBroke("ConnectionError"), AnswersLost(1, "store"), AnswersLost(1, "store")]


async def test_a_store_that_hangs_holds_nobody_up() -> None:
    house = House(timeout_s=0.05)
    house.store.hangs = True
    async with asyncio.timeout(15):
        assert await house.cache.find(question("Who created Berserk?")) is None
    house.now = REST_S
    async with asyncio.timeout(15):
        assert await house.cache.find(question("Who created Berserk?"), timeout_s=0.0) is None
    assert house.kinds == [Lookup.ERROR, Lookup.ERROR]


async def test_a_defect_in_one_question_does_not_end_the_loop() -> None:
    house = House()

    def bad() -> str:
        raise KeyError("unexpected")

    house.cache.remember(bad, ANSWER)
    await house.cache.flush()
    assert house.events == [AnswersLost(1, "defect", "KeyError")]
    await house.remember("Who created Berserk?")
    assert await house.cache.find(question("Who created Berserk?")) is not None


async def test_a_caller_who_leaves_during_a_look_leaves_nothing_behind() -> None:
    house = House()
    await house.remember("Who created Berserk?")
    house.store.hangs = True
    task = asyncio.get_running_loop().create_task(house.cache.find(question("Who created Berserk?")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    house.store.hangs = False
    assert await house.cache.find(question("Who created Berserk?")) is not None


@given(
    st.lists(st.none() | st.text(max_size=4), max_size=4),
    st.lists(st.none() | st.text(max_size=4), max_size=4),
    st.lists(st.integers(0, 300), max_size=4),
    st.lists(st.integers(0, 300), max_size=4),
)
def test_two_lists_share_a_digest_only_when_they_are_equal(
    one: list[str | None], other: list[str | None], ids: list[int], other_ids: list[int]
) -> None:
    assume((one, ids) != (other, other_ids))
    assert digest_of(one, ids) != digest_of(other, other_ids)
    assert digest_of(one, ids) == digest_of(list(one), tuple(ids))
