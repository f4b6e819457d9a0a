"""Appends by several writers, outages and reads in any order: no loss, no gap, and all followers converge."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.state.errors import Conflict, StateUnavailable
from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.state.port import Record
from gateway.state.projection import ProjectionState
from gateway.state.stream_follower import StreamFollower

T = TypeVar("T")
WRITERS = st.integers(0, 2)
STREAMS = st.sampled_from(["a", "b"])


class Appending(RuleBasedStateMachine):
    """The model is the acknowledged records of each stream; the heads that a writer knows may be old."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.streams = MemoryStreams()
        self.stores = [MemoryStateStore(self.streams, unix_time=lambda: 1.0) for _ in range(3)]
        self.model: dict[str, list[bytes]] = {"a": [], "b": []}
        self.known = [{"a": 0, "b": 0} for _ in range(3)]
        self.applied: dict[str, list[Record]] = {"a": [], "b": []}
        self.followers: dict[str, StreamFollower] = {}

    @initialize()
    def follow(self) -> None:
        for stream, applied in self.applied.items():
            self.followers[stream] = self.run(self._follower(stream, applied))

    async def _follower(self, stream: str, applied: list[Record]) -> StreamFollower:
        return StreamFollower(self.stores[0], stream, applied.append, copy=None, clock=lambda: 0.0)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @rule(writer=WRITERS, stream=STREAMS, n=st.integers(0, 9), known=st.booleans())
    def append(self, writer: int, stream: str, n: int, known: bool) -> None:
        data, head = str(n).encode(), len(self.model[stream])
        expected = self.known[writer][stream] if known else None
        try:
            record = self.run(
                self.stores[writer].append(stream, data, author=f"w{writer}", expected=expected)
            )
        except Conflict as conflict:
            assert expected is not None and expected != head and conflict.found == head
        except StateUnavailable:
            assert self.streams.down
        else:
            assert not self.streams.down and expected in (None, head) and record.number == head + 1
            self.model[stream].append(data)
            self.known[writer][stream] = record.number

    @rule(writer=WRITERS, stream=STREAMS)
    def look(self, writer: int, stream: str) -> None:
        if not self.streams.down:
            self.known[writer][stream] = self.run(self.stores[writer].heads()).get(stream, 0)

    @rule(down=st.booleans())
    def absence(self, down: bool) -> None:
        self.streams.down = down

    @rule(stream=STREAMS)
    def catch_up(self, stream: str) -> None:
        follower = self.followers[stream]
        self.run(follower.start(1.0))
        if not self.streams.down:
            assert follower.state is ProjectionState.FOLLOWING
            assert follower.number == len(self.model[stream])

    @invariant()
    def check_integrity(self) -> None:
        for stream, texts in self.model.items():
            kept = self.streams.records.get(stream, [])
            assert [record.data for record in kept] == texts
            assert [record.number for record in kept] == list(range(1, len(kept) + 1))
            assert self.applied[stream] == kept[: len(self.applied[stream])], "a prefix, each once"

    def teardown(self) -> None:
        self.streams.down = False
        for stream, follower in self.followers.items():
            self.run(follower.start(1.0))
            assert self.applied[stream] == self.streams.records.get(stream, [])
        self.runner.close()


TestAppending = Appending.TestCase
TestAppending.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
