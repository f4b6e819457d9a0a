"""Operations on a SQLite file that wait at the same moment share one transaction."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.state.errors import StateUnavailable
from gateway.state.sqlite_file import SqliteFile

TABLES = ("CREATE TABLE IF NOT EXISTS numbers (number INTEGER PRIMARY KEY)",)


class Busy:
    """A file whose thread is busy until ``free`` is called, so that operations wait; ``statements`` are
    those it executes after that.
    """

    def __init__(self, path: Path) -> None:
        self.file = SqliteFile(path, TABLES, synchronous="OFF")
        self.statements: list[str] = []
        self._end = threading.Event()
        self._first = asyncio.gather(self.file.run("wait", self._wait))

    def _wait(self, connection: sqlite3.Connection) -> None:
        self._end.wait(60)
        connection.set_trace_callback(self.statements.append)

    async def free(self) -> None:
        await asyncio.sleep(0)
        self._end.set()
        await self._first

    async def insert(self, number: int) -> int:
        return await self.file.run("insert", inserting(number))


def inserting(number: int) -> Callable[[sqlite3.Connection], int]:
    def act(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO numbers VALUES (?)", (number,))
        if number < 0:
            raise LookupError(number)
        return number

    return act


@pytest.fixture
async def busy(tmp_path: Path) -> AsyncIterator[Busy]:
    found = Busy(tmp_path / "numbers")
    await asyncio.sleep(0)
    yield found
    await found.file.close()


async def stored(file: SqliteFile) -> list[int]:
    query = "SELECT number FROM numbers ORDER BY number"
    return await file.run(
        "read", lambda connection: [row[0] for row in connection.execute(query)], writes=False
    )


async def test_operations_that_wait_share_one_transaction_and_each_has_its_own_result(busy: Busy) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(busy.insert(number)) for number in range(20)]
        reading = tasks.create_task(stored(busy.file))
        await busy.free()
    assert [one.result() for one in waiting] == list(range(20)) == reading.result()
    inserts = [f"INSERT INTO numbers VALUES ({number})" for number in range(20)]
    assert busy.statements[1:23] == ["BEGIN IMMEDIATE", *inserts, "COMMIT"]


@pytest.mark.parametrize("wrong", [-1, 3])
async def test_an_operation_that_fails_is_undone_alone(busy: Busy, wrong: int) -> None:
    numbers = 1, 2, 3, wrong, 4
    waiting = asyncio.gather(*(busy.insert(number) for number in numbers), return_exceptions=True)
    await busy.free()
    done = await waiting
    assert isinstance(done.pop(3), LookupError if wrong < 0 else StateUnavailable)
    assert done == [1, 2, 3, 4] == await stored(busy.file)


async def test_an_operation_that_is_cancelled_while_it_waits_is_left_out(busy: Busy) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(busy.insert(number)) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await busy.free()
    assert waiting[1].cancelled() and await stored(busy.file) == [1, 3]
