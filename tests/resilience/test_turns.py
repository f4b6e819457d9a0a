"""Pieces of work that share the event loop with urgent work."""

from __future__ import annotations

import asyncio

import pytest

from resilience.turns import HOLD_S, Turns

PIECES = 20


async def test_pieces_that_come_together_run_in_order_one_a_turn_of_the_loop() -> None:
    turns, ran, most = Turns(), list[int](), 0

    async def piece(number: int) -> None:
        await turns.next()
        ran.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(PIECES):
            group.create_task(piece(number))
        while len(ran) < PIECES:
            before = len(ran)
            await asyncio.sleep(0)  # one loop turn: other work waits for the pieces in it
            most = max(most, len(ran) - before)
    assert (ran, most) == (list(range(PIECES)), 1)


async def test_a_piece_by_itself_does_not_wait() -> None:
    with pytest.raises(StopIteration):
        Turns().next().send(None)


async def test_a_cancelled_piece_keeps_no_other_waiting() -> None:
    turns = Turns()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        _, gone, _ = [group.create_task(turns.next()) for _ in range(3)]
        await asyncio.sleep(0)
        gone.cancel()
    assert gone.cancelled()
    async with asyncio.timeout(30):
        await turns.next()


async def test_pieces_wait_for_urgent_work_and_no_longer() -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        with turns.urgent() as work, turns.urgent() as other:
            early = loop.time() + HOLD_S / 4
            piece = group.create_task(turns.next())
            for _ in range(PIECES):
                await asyncio.sleep(0)
            work.end()
            work.end()  # a second call does not count
            await asyncio.sleep(0)
            assert not piece.done() or loop.time() > early
            other.end()
            await piece
    with pytest.raises(StopIteration):
        turns.next().send(None)


async def test_urgent_work_that_does_not_end_keeps_no_piece_for_long() -> None:
    turns = Turns()
    async with asyncio.timeout(30):
        with turns.urgent():
            began = asyncio.get_running_loop().time()
            for _ in range(3):
                await turns.next()
            assert asyncio.get_running_loop().time() - began > 2 * HOLD_S
        await turns.next()


async def test_urgent_work_that_fails_has_ended() -> None:
    turns = Turns()
    with pytest.raises(LookupError), turns.urgent():
        raise LookupError
    with pytest.raises(StopIteration):
        turns.next().send(None)


async def test_urgent_work_that_comes_together_goes_through_each_part_together() -> None:
    turns, done = Turns(), list[tuple[str, int]]()

    async def work(number: int) -> None:
        with turns.urgent() as urgent:
            for part in "abc":
                done.append((part, number))
                await urgent.next_turn()

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(work(number))
    assert done == [(part, number) for part in "abc" for number in range(4)]


def test_urgent_work_that_is_alone_gives_way_only_once() -> None:
    async def work() -> None:
        with Turns().urgent() as urgent:
            for _ in range(3):
                await urgent.next_turn()

    working = work()
    working.send(None)
    with pytest.raises(StopIteration):
        working.send(None)
