"""The commit buffer sends pieces in order and in time, and can discard them."""

from __future__ import annotations

import asyncio

import pytest

from gateway.contracts.events import Delta
from gateway.generation.commit_buffer import CommitBuffer


class Reader:
    """Takes pieces while ``open`` is set; raises ``error`` instead if there is one."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.got: list[str] = []
        self.reading = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self._error = error

    async def take(self, delta: Delta) -> None:
        self.reading.set()
        await self.open.wait()
        if self._error is not None:
            raise self._error
        self.got.append(delta.text)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def buffer(
    reader: Reader, *, chunks: int = 3, seconds: float = 60.0, clock: Clock | None = None
) -> CommitBuffer:
    return CommitBuffer(reader.take, chunks=chunks, seconds=seconds, clock=clock or Clock())


async def test_pieces_are_held_until_there_are_enough() -> None:
    reader = Reader()
    held = buffer(reader)
    for piece in "ab":
        await held.take(Delta(piece, 1))
    assert reader.got == [] and held.holding
    await held.take(Delta("c", 1))
    assert reader.got == ["a", "b", "c"] and not held.holding


async def test_a_late_piece_commits_all() -> None:
    reader, clock = Reader(), Clock()
    held = buffer(reader, seconds=0.05, clock=clock)
    await held.take(Delta("a", 1))
    clock.now = 0.06
    await held.take(Delta("b", 1))
    assert reader.got == ["a", "b"]


async def test_what_is_held_can_be_discarded() -> None:
    reader = Reader()
    held = buffer(reader)
    await held.take(Delta("a", 1))
    held.discard()
    await held.take(Delta("b", 1))
    await held.commit()
    assert reader.got == ["b"]


async def test_pieces_that_come_while_a_slow_reader_takes_the_first_follow_in_order() -> None:
    reader = Reader()
    reader.open.clear()
    held = buffer(reader, seconds=0.0)

    async def work() -> str:
        await held.take(Delta("a", 1))
        return "done"

    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(held.run(work()))
        await reader.reading.wait()
        second = tasks.create_task(held.take(Delta("b", 1)))
        await asyncio.sleep(0)
        reader.open.set()
    assert first.result() == "done" and second.done()
    assert reader.got == ["a", "b"]


async def test_a_piece_that_comes_in_the_turn_of_the_commit_follows_at_once() -> None:
    reader = Reader()
    held = buffer(reader)
    await held.take(Delta("a", 1))
    second = held.take(Delta("b", 1))  # made in the callback that received it, awaited after the commit
    await held.commit()
    await second
    assert reader.got == ["a", "b"]


async def test_after_a_piece_that_is_cut_off_on_its_way_none_of_those_behind_it_is_sent() -> None:
    reader = Reader()
    held = buffer(reader)
    for piece in "ab":
        await held.take(Delta(piece, 1))
    reader.open.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(held.commit(), 0.01)
    reader.open.set()
    await held.commit()
    assert reader.got == []


async def test_work_that_fails_while_a_piece_goes_out_waits_for_it_and_fails_as_it_is() -> None:
    reader = Reader()
    reader.open.clear()
    held = buffer(reader, seconds=0.001)

    async def work() -> None:
        await held.take(Delta("a", 1))
        await reader.reading.wait()
        reader.open.set()
        raise LookupError

    with pytest.raises(LookupError):
        await held.run(work())
    assert reader.got == ["a"]


async def test_a_reader_that_is_gone_ends_the_work_with_its_own_error() -> None:
    held = buffer(Reader(error=ConnectionError()), seconds=0.001)
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await held.take(Delta("a", 1))
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(ConnectionError):
        await held.run(work())
    assert ended.is_set()
