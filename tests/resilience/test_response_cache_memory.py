"""Answers stored in the process are bounded in number, bytes and age, whatever the order of calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resilience.response_cache_memory import ENTRY_BYTES, MemoryStore
from resilience.response_cache_values import CachedAnswer, StoredAnswer


@dataclass
class Clock:
    """A clock that is set by hand."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def store(clock: Clock, *, capacity: int = 3, max_bytes: int = 1 << 20, ttl_s: float = 10.0) -> MemoryStore:
    return MemoryStore(capacity=capacity, max_bytes=max_bytes, ttl_s=ttl_s, clock=clock)


def entry(key: str, *, put_at: float = 0.0, text: str = "answer") -> StoredAnswer:
    return StoredAnswer(key, CachedAnswer(text, "stop"), put_at)


async def test_the_least_recently_used_leaves_first() -> None:
    memory = store(Clock(), capacity=2)
    await memory.put([entry("a"), entry("b")])
    assert await memory.get("a") is not None
    await memory.put([entry("c")])
    assert [await memory.get(key) is not None for key in "abc"] == [True, False, True]


async def test_an_entry_is_gone_when_its_time_is_up() -> None:
    clock = Clock()
    memory = store(clock)
    await memory.put([entry("a")])
    clock.now = 9.9
    assert await memory.get("a") is not None
    clock.now = 10.0
    assert await memory.get("a") is None
    assert memory.figures().entries == 0


async def test_bytes_are_bounded_and_an_answer_beyond_them_is_not_kept() -> None:
    memory = store(Clock(), capacity=1000, max_bytes=5 * ENTRY_BYTES)
    await memory.put([entry(str(n)) for n in range(20)])
    assert memory.figures().entries == 4
    await memory.put([entry("large", text="x" * 5 * ENTRY_BYTES)])
    assert await memory.get("large") is None and memory.figures().entries == 4


class Anything(RuleBasedStateMachine):
    """Puts, lookups and waits in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.memory = store(self.clock, capacity=4, max_bytes=5 * ENTRY_BYTES)

    @rule(
        key=st.sampled_from("abcdefgh"), size=st.integers(0, 400), shelf=st.sampled_from([None, "one", "two"])
    )
    def put(self, key: str, size: int, shelf: str | None) -> None:
        made = entry(key, put_at=self.clock.now, text="x" * size)
        asyncio.run(self.memory.put([replace(made, shelf=shelf, vector=b"" if shelf is None else bytes(8))]))

    @rule(key=st.sampled_from("abcdefgh"))
    def get(self, key: str) -> None:
        found = asyncio.run(self.memory.get(key))
        assert found is None or (found.key == key and self.clock.now - found.put_at < 10.0)

    @rule(seconds=st.floats(0.1, 6.0))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def is_whole(self) -> None:
        self.memory.check_integrity()


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
