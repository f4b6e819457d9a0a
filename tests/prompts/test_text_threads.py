"""Texts processed in threads: which text gets a thread when, and that nothing is left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from msgspec import structs

from budgeting.values import Message, Role, Tool
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest
from gateway.errors import DeadlineExceeded, RateLimited
from gateway.prompts.text_threads import (
    LARGE_CHARS,
    MAX_WAITING,
    MAX_WAITING_CHARS,
    TextThreads,
    text_chars,
)

SMALL, LARGE = 10_000, LARGE_CHARS + 1


class BlockedWork:
    """Makes work that records its name when it begins and ends when the test opens it."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._open: dict[str, threading.Event] = {}

    def work(self, name: str) -> Callable[[], str]:
        self._open[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            assert self._open[name].wait(60)
            return name

        return work

    def open(self, *names: str) -> None:
        for name in names:
            self._open[name].set()


def count(jobs: Mapping[str, Sequence[object]]) -> int:
    return sum(map(len, jobs.values()))


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.002)


async def test_a_tenant_has_one_large_text_at_work_and_leaves_threads_to_smaller_ones() -> None:
    threads, blocked = TextThreads(2), BlockedWork()
    async with asyncio.TaskGroup() as group:
        group.create_task(threads.run("flood", LARGE, blocked.work("first")))
        group.create_task(threads.run("other", LARGE, blocked.work("other large")))
        group.create_task(threads.run("flood", LARGE, blocked.work("second")))
        small = group.create_task(threads.run("other", SMALL, blocked.work("other small")))
        await until(lambda: len(blocked.begun) == 2)
        assert sorted(blocked.begun) == ["first", "other small"], "of two threads one is for smaller texts"
        blocked.open("other small")
        assert await small == "other small"
        assert (count(threads.at_work), count(threads.waiting)) == (1, 2), (
            "a free thread takes no second large text"
        )
        blocked.open("first", "second", "other large")
    assert sorted(blocked.begun[2:]) == ["other large", "second"]
    assert (count(threads.at_work), count(threads.waiting)) == (0, 0)


async def test_a_text_for_which_no_thread_can_be_started_fails_alone_and_gives_its_place_back() -> None:
    class NoThreadOnce(ThreadPoolExecutor):
        asked = 0

        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            self.asked += 1
            if self.asked == 2:
                raise RuntimeError("can't start new thread")
            return super().submit(*args, **kwargs)

    threads, blocked = TextThreads(1), BlockedWork()
    threads._pool = NoThreadOnce(1)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(threads.run("one", LARGE, blocked.work("first")))
        second = asyncio.gather(threads.run("two", LARGE, lambda: "second"), return_exceptions=True)
        third = group.create_task(threads.run("three", LARGE, lambda: "third"))
        await until(lambda: blocked.begun == ["first"])
        blocked.open("first")
        async with asyncio.timeout(60):
            assert (await first, await third) == ("first", "third")
            [failed] = await second
    assert isinstance(failed, RuntimeError)
    assert (count(threads.at_work), count(threads.waiting)) == (0, 0)


async def test_tenants_take_turns_however_many_texts_one_has() -> None:
    threads, blocked = TextThreads(1), BlockedWork()
    flood = [f"flood {number}" for number in range(20)]
    async with asyncio.TaskGroup() as group:
        for name in flood:
            group.create_task(threads.run("flood", SMALL, blocked.work(name)))
        await until(lambda: blocked.begun == ["flood 0"])
        group.create_task(threads.run("other", SMALL, blocked.work("other")))
        await until(lambda: count(threads.waiting) == 20)
        blocked.open("other", *flood)
    assert blocked.begun.index("other") <= 2


async def test_a_cancelled_text_that_waits_is_dropped_and_one_at_work_counts_until_its_end() -> None:
    threads, blocked = TextThreads(2), BlockedWork()
    async with asyncio.TaskGroup() as group:
        at_work = group.create_task(threads.run("flood", LARGE, blocked.work("at work")))
        waits = group.create_task(threads.run("flood", LARGE, blocked.work("waits")))
        await until(lambda: blocked.begun == ["at work"])
        for one in (at_work, waits):
            one.cancel()
        await asyncio.wait((at_work, waits))
        assert (count(threads.at_work), count(threads.waiting)) == (1, 0), "a thread cannot be ended"
        again = group.create_task(threads.run("flood", LARGE, blocked.work("again")))
        await until(lambda: count(threads.waiting) == 1)
        blocked.open("at work", "again")
        assert await again == "again"
    assert blocked.begun == ["at work", "again"]
    assert (count(threads.at_work), count(threads.waiting)) == (0, 0)


@pytest.mark.parametrize(("chars", "most"), [(SMALL, MAX_WAITING), (4 << 20, MAX_WAITING_CHARS // (4 << 20))])
async def test_a_tenant_holds_so_many_texts_and_no_more(chars: int, most: int) -> None:
    threads, blocked = TextThreads(2), BlockedWork()
    async with asyncio.TaskGroup() as group:
        for number in range(most):
            group.create_task(threads.run("flood", chars, blocked.work(str(number))))
        await until(lambda: count(threads.at_work) + count(threads.waiting) == most)
        with pytest.raises(RateLimited, match="allowed"):
            await threads.run("flood", chars, blocked.work("too many"))
        group.create_task(threads.run("other", chars, blocked.work("other")))
        blocked.open("other", *map(str, range(most)))


async def test_a_text_larger_than_the_bound_is_taken_when_the_tenant_has_no_other() -> None:
    assert await TextThreads(2).run("one", MAX_WAITING_CHARS + 1, lambda: "done") == "done"


async def test_the_memory_of_large_texts_is_given_back() -> None:
    given: list[str] = []
    threads = TextThreads(1, give_back=lambda: given.append("back"))
    await threads.run("one", SMALL, lambda: "small")
    assert given == []
    with pytest.raises(ZeroDivisionError):
        await threads.run("one", LARGE, lambda: 1 // 0)
    assert given == ["back"]
    assert await TextThreads(1).run("one", LARGE, lambda: "by the C library") == "by the C library"


async def test_at_a_requests_deadline_its_waiting_text_is_dropped_and_one_at_work_counts_until_its_end() -> (
    None
):
    threads, blocked = TextThreads(1), BlockedWork()
    late = structs.replace(a_request(), deadline=time.monotonic() + 0.05)
    async with asyncio.timeout(60):
        results = await asyncio.gather(
            threads.of(late)(blocked.work("at work")),
            threads.of(late)(blocked.work("waiting")),
            return_exceptions=True,
        )
    said = "the deadline passed before its prompt had been counted: send less text, or a later deadline"
    assert [type(one) for one in results] == 2 * [DeadlineExceeded] and {str(one) for one in results} == {
        said
    }
    assert (count(threads.at_work), count(threads.waiting)) == (1, 0)
    blocked.open("at work")
    await until(lambda: not threads.at_work)
    assert blocked.begun == ["at work"]
    assert await threads.of(structs.replace(late, deadline=time.monotonic() + 600))(lambda: 3) == 3


async def test_an_error_of_the_work_is_the_callers() -> None:
    threads = TextThreads(1)
    with pytest.raises(ZeroDivisionError):
        await threads.run("one", SMALL, lambda: 1 // 0)
    assert await threads.run("one", SMALL, lambda: 2) == 2


def a_request() -> GenerateRequest:
    return GenerateRequest(
        "req_1",
        "gen_1",
        Caller("acme", CallerRole.CALLER, "key_1"),
        contract=Contract.NATIVE,
        arrived_at=0.0,
        created=0,
        messages=(Message(Role.USER, "four"), Message(Role.ASSISTANT, "", reasoning="thoughts")),
        tools=(Tool("find", description="searches", parameters='{"type":"object"}'),),
        context={"a": "b"},
        raw_prompt="raw",
    )


async def test_a_requests_size_is_that_of_all_its_texts() -> None:
    tool = len('searches{"type":"object"}')
    assert text_chars(a_request()) == len("four") + len("thoughts") + tool + len("{'a': 'b'}") + len("raw")
