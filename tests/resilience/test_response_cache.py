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
class CacheRig:
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

    async def remember(self, text: str, answer: CachedAnswer = ANSWER) -> None:
        self.cache.remember(lambda: question(text), answer)
        await self.cache.flush()

    @property
    def kinds(self) -> list[Lookup]:
        return [event.kind for event in self.events if isinstance(event, LookedUp)]


def question(text: str) -> str:
    return digest_of([text])


async def test_the_same_question_is_answered_and_told_as_the_same() -> None:
    rig = CacheRig()
    await rig.remember("Who created Berserk?")
    assert await rig.cache.find(question("Who created Berserk?")) == ANSWER
    assert rig.kinds == [Lookup.EXACT]


async def test_another_question_gets_no_stored_answer() -> None:
    rig = CacheRig()
    await rig.remember("Who created Berserk?")
    assert await rig.cache.find(question("Who made Berserk?")) is None
    assert rig.kinds == [Lookup.MISS]


async def test_questions_are_made_in_another_thread() -> None:
    rig = CacheRig()
    threads = []

    def ask() -> str:
        threads.append(threading.get_ident())
        return question("Who created Berserk?")

    rig.cache.remember(ask, ANSWER)
    assert threads == []
    await rig.cache.flush()
    assert threads and threading.get_ident() not in threads


async def test_what_does_not_fit_into_the_outbox_is_lost_and_counted() -> None:
    rig = CacheRig(outbox=2)
    for n in range(5):
        rig.cache.remember(lambda n=n: question(f"CacheQuestion {n}"), ANSWER)  # type: ignore[misc]
    assert len(rig.cache.waiting) == 2
    assert rig.events == [AnswersLost(1, "outbox_full")] * 3


async def test_the_loop_keeps_what_is_remembered_while_it_runs() -> None:
    rig = CacheRig()
    async with asyncio.TaskGroup() as loops:
        loop = loops.create_task(rig.cache.run())
        for n in range(3):
            rig.cache.remember(lambda n=n: question(f"CacheQuestion {n}"), ANSWER)  # type: ignore[misc]
            for _ in range(5_000):
                if rig.store.figures().entries == n + 1:
                    break
                await asyncio.sleep(0.001)
            assert rig.store.figures().entries == n + 1
        loop.cancel()


async def test_a_broken_store_is_a_miss_told_once_and_left_alone_for_a_while() -> None:
    rig = CacheRig()
    rig.store.broken = True
    for _ in range(3):
        assert await rig.cache.find(question("Who created Berserk?")) is None
    assert rig.store.asked == 1
    assert rig.kinds == [Lookup.ERROR] * 3
    assert [event for event in rig.events if isinstance(event, StoreBroke)] == [StoreBroke("ConnectionError")]
    rig.now = REST_S
    rig.store.broken = False
    assert await rig.cache.find(question("Who created Berserk?")) is None
    assert rig.events[-2:] == [StoreIsBack(), LookedUp(Lookup.MISS)]


async def test_a_store_that_broke_is_asked_again_though_the_clock_was_set_back() -> None:
    rig = CacheRig(now=10_000.0)
    rig.store.broken = True
    await rig.cache.find(question("Who created Berserk?"))
    rig.now, rig.store.broken = 6_400.0, False
    await rig.remember("Who created Berserk?")
    assert await rig.cache.find(question("Who created Berserk?")) == ANSWER


async def test_answers_that_a_broken_store_cannot_take_are_lost_and_counted() -> None:
    rig = CacheRig()
    rig.store.broken = True
    await rig.remember("Who created Berserk?")
    await rig.remember("Who created Bleach?")
    assert rig.events == [StoreBroke("ConnectionError"), AnswersLost(1, "store"), AnswersLost(1, "store")]


async def test_a_store_that_hangs_holds_nobody_up() -> None:
    rig = CacheRig(timeout_s=0.05)
    rig.store.hangs = True
    async with asyncio.timeout(15):
        assert await rig.cache.find(question("Who created Berserk?")) is None
    rig.now = REST_S
    async with asyncio.timeout(15):
        assert await rig.cache.find(question("Who created Berserk?"), timeout_s=0.0) is None
    assert rig.kinds == [Lookup.ERROR, Lookup.ERROR]


async def test_a_caller_without_time_left_does_not_keep_others_from_the_store() -> None:
    rig = CacheRig()
    await rig.remember("Who created Berserk?")
    rig.store.hangs = True
    async with asyncio.timeout(15):
        assert await rig.cache.find(question("Who created Berserk?"), timeout_s=-0.001) is None
    rig.store.hangs = False
    assert await rig.cache.find(question("Who created Berserk?")) == ANSWER
    assert [event for event in rig.events if isinstance(event, StoreBroke)] == []


async def test_a_defect_in_one_question_does_not_end_the_loop() -> None:
    rig = CacheRig()

    def bad() -> str:
        raise KeyError("unexpected")

    rig.cache.remember(bad, ANSWER)
    await rig.cache.flush()
    assert rig.events == [AnswersLost(1, "defect", "KeyError")]
    await rig.remember("Who created Berserk?")
    assert await rig.cache.find(question("Who created Berserk?")) is not None


async def test_a_caller_who_leaves_during_a_look_leaves_nothing_behind() -> None:
    rig = CacheRig()
    await rig.remember("Who created Berserk?")
    rig.store.hangs = True
    task = asyncio.get_running_loop().create_task(rig.cache.find(question("Who created Berserk?")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    rig.store.hangs = False
    assert await rig.cache.find(question("Who created Berserk?")) is not None


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
