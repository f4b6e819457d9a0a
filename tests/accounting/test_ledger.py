"""The ledger: rows are durable and stored exactly once, and each lost row is counted."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.errors import LedgerUnavailable
from accounting.events import DatabaseIsBack, LedgerEvent, LossReason, RowsLost, RowsWritten, WriteFailed
from accounting.ledger import Ledger
from accounting.options import LedgerOptions
from accounting.store import GenerationStore, is_the_rows_fault
from accounting.tables import generations
from accounting.values import UsageRow
from tests.usage_rows import newest_rows


def row(generation_id: str, **values: object) -> UsageRow:
    given_values: dict[str, object] = {
        "generation_id": generation_id,
        "request_id": "req_1",
        "tenant": "acme",
        "key_id": "k1",
        "contract": "native",
        "route": "main",
        "started_at": 1_700_000_000.0,
        "finish_reason": "stop",
        **values,
    }
    return UsageRow(**given_values)  # type: ignore[arg-type]


def url_of(path: Path) -> str:
    return f"sqlite+aiosqlite:///{path}"


class Events(list[LedgerEvent]):
    """The events that the ledger emitted, in order."""

    def written(self) -> int:
        return sum(event.count for event in self if isinstance(event, RowsWritten))

    def lost(self) -> int:
        return sum(event.count for event in self if isinstance(event, RowsLost))


def ledger_for(url: str, events: Events, *, outbox_rows: int = 10_000, batch_rows: int = 500) -> Ledger:
    return Ledger(
        url,
        LedgerOptions(
            emit=events.append,
            clock=time.monotonic,
            unix_time=time.time,
            outbox_rows=outbox_rows,
            batch_rows=batch_rows,
        ),
    )


@asynccontextmanager
async def running(ledger: Ledger, *, close_s: float = 5.0) -> AsyncIterator[Ledger]:
    """Run a ledger as a gateway does: open it, run its writer in a task group, close it."""
    await ledger.open()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ledger.run())
        try:
            yield ledger
        finally:
            await ledger.close(close_s)


async def until(condition: Callable[[], bool], *, at_most_s: float = 30.0) -> None:
    async with asyncio.timeout(at_most_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is another thread's or file's state
            await asyncio.sleep(0.005)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the database file's write lock, as another process would."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def stored_ids(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [line[0] for line in connection.execute("SELECT generation_id FROM generations")]


def test_the_table_has_a_column_for_every_field_of_a_row() -> None:
    assert {column.name for column in generations.columns} == {
        field.name for field in msgspec.structs.fields(UsageRow)
    } | {"hour"}


def test_sqlite_has_an_adapter_for_the_values_of_a_row_that_are_none() -> None:
    adapter = sqlite3.adapters[type(None), sqlite3.PrepareProtocol]
    assert adapter(None) is None


@pytest.mark.asyncio
async def test_a_row_comes_back_as_it_was_appended(tmp_path: Path) -> None:
    full = row(
        "gen_1", intent="x", adapter_id="a", revision=3, ttft_ms=1.5, output_tokens=7, session_id="søster 漫"
    )
    events = Events()
    async with running(ledger_for(url_of(tmp_path / "l.db"), events)) as ledger:
        assert ledger.append(full)
        await until(lambda: ledger.depth == 0)
        assert await newest_rows(ledger) == [full]
        assert (events.written(), events.lost(), ledger.healthy) == (1, 0, True)


@pytest.mark.asyncio
async def test_rows_come_newest_first_and_no_more_than_asked_for() -> None:
    async with running(ledger_for("sqlite+aiosqlite://", Events())) as ledger:
        for number in range(5):
            ledger.append(row(f"gen_{number}", started_at=float(number)))
        await until(lambda: ledger.depth == 0)
        assert [found.generation_id for found in await newest_rows(ledger, 2)] == ["gen_4", "gen_3"]


@pytest.mark.asyncio
async def test_sqlite_files_are_in_wal_mode_so_that_reports_can_read_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    async with running(ledger_for(url_of(path), Events())):
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.asyncio
async def test_rows_are_written_in_batches_of_bounded_size(tmp_path: Path) -> None:
    events = Events()
    ledger = ledger_for(url_of(tmp_path / "l.db"), events, batch_rows=10)
    await ledger.open()
    for number in range(25):
        ledger.append(row(f"gen_{number}"))
    await ledger.close()
    assert [event.count for event in events if isinstance(event, RowsWritten)] == [10, 10, 5]


@pytest.mark.asyncio
async def test_a_generation_is_stored_once_however_often_it_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    for _ in range(2):
        async with running(ledger_for(url_of(path), Events())) as ledger:
            for _ in range(3):
                ledger.append(row("gen_1", output_tokens=5))
    assert stored_ids(path) == ["gen_1"]


@pytest.mark.asyncio
async def test_a_writer_cancelled_in_a_batch_neither_loses_nor_doubles_rows(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    # a database call takes a few turns of the event loop; cancel after 0, 1, ... 39 of them
    for rounds in range(40):
        events = Events()
        ledger = ledger_for(url_of(path), events, batch_rows=3)
        await ledger.open()
        for number in range(6):
            ledger.append(row(f"gen_{rounds}_{number}"))
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(ledger.run())
            for _ in range(rounds):
                await asyncio.sleep(0)
            writer.cancel()
        await ledger.close()
        assert (events.written(), events.lost(), ledger.depth) == (6, 0, 0)
    assert len(stored_ids(path)) == len(set(stored_ids(path))) == 240


@pytest.mark.asyncio
async def test_a_locked_database_makes_rows_wait_and_loses_none(tmp_path: Path) -> None:
    path, events = tmp_path / "l.db", Events()
    async with running(ledger_for(url_of(path), events)) as ledger:
        with locked(path):
            began = time.perf_counter()
            assert all(ledger.append(row(f"gen_{number}")) for number in range(100))
            assert time.perf_counter() - began < 5.0, "nobody waits for the lock"
            await until(lambda: not ledger.healthy)
            assert ledger.depth == 100
        await until(lambda: ledger.depth == 0)
        assert ledger.healthy
    assert len(stored_ids(path)) == 100
    assert events.lost() == 0
    failed = [event.error_type for event in events if isinstance(event, WriteFailed)]
    assert set(failed) == {"OperationalError SQLITE_BUSY"}, "the log says what is wrong with the database"
    back = [event.failures for event in events if isinstance(event, DatabaseIsBack)]
    assert back == [len(failed)], "and once that it works again"


@pytest.mark.asyncio
async def test_a_start_on_a_locked_database_succeeds_and_gets_well_later(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    with locked(path):
        ledger = ledger_for(url_of(path), Events())
        await ledger.open()
        assert not ledger.healthy
        ledger.append(row("gen_1"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ledger.run())
        await until(lambda: ledger.depth == 0)
        await ledger.close()
    assert stored_ids(path) == ["gen_1"]


@pytest.mark.asyncio
async def test_a_ledger_that_started_badly_gets_well_without_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    async with running(ledger_for(url_of(folder / "l.db"), Events())) as ledger:
        assert not ledger.healthy
        folder.mkdir()
        await until(lambda: ledger.healthy)


@pytest.mark.asyncio
async def test_closing_on_a_locked_database_is_bounded_and_counts_what_is_lost(tmp_path: Path) -> None:
    path, events = tmp_path / "l.db", Events()
    ledger = ledger_for(url_of(path), events)
    await ledger.open()
    with locked(path):
        for number in range(30):
            ledger.append(row(f"gen_{number}"))
        began = time.perf_counter()
        await ledger.close(0.3)
        assert time.perf_counter() - began < 5.0
    assert (events.lost(), ledger.depth, events.written()) == (30, 0, 0)
    (loss,) = (event for event in events if isinstance(event, RowsLost))
    assert (loss.count, loss.reason) == (30, LossReason.CLOSED)
    assert loss.generation_ids == tuple(f"gen_{number}" for number in range(20))
    assert stored_ids(path) == []


@pytest.mark.asyncio
async def test_a_read_only_file_makes_rows_wait_until_it_is_writable_again(tmp_path: Path) -> None:
    path, events = tmp_path / "l.db", Events()
    await _made(path)
    path.chmod(0o444)
    if os.access(path, os.W_OK):
        pytest.skip("the superuser writes to read-only files")
    async with running(ledger_for(url_of(path), events)) as ledger:
        ledger.append(row("gen_1"))
        await until(lambda: any(isinstance(event, WriteFailed) for event in events))
        assert (ledger.depth, ledger.healthy, events.lost()) == (1, False, 0)
        assert await newest_rows(ledger) == []  # reads still work
        path.chmod(0o644)
        await until(lambda: ledger.depth == 0)
    assert stored_ids(path) == ["gen_1"]


@pytest.mark.asyncio
async def test_a_database_opened_read_only_is_read_but_loses_its_rows_with_a_count(tmp_path: Path) -> None:
    path, events = tmp_path / "l.db", Events()
    await _made(path)
    async with running(
        ledger_for(f"sqlite+aiosqlite:///file:{path}?mode=ro&uri=true", events), close_s=0.3
    ) as ledger:
        assert ledger.append(row("gen_1"))
        await until(lambda: any(isinstance(event, WriteFailed) for event in events))
        assert (ledger.depth, events.lost()) == (1, 0)
        assert await newest_rows(ledger) == []
    assert events.lost() == 1
    assert stored_ids(path) == []


async def _made(path: Path) -> None:
    ledger = ledger_for(url_of(path), Events())
    await ledger.open()
    await ledger.close()


@pytest.mark.asyncio
async def test_a_full_outbox_refuses_the_row_and_counts_it(tmp_path: Path) -> None:
    events = Events()
    ledger = ledger_for(url_of(tmp_path / "l.db"), events, outbox_rows=3)
    await ledger.open()
    assert [ledger.append(row(f"gen_{number}")) for number in range(5)] == [True, True, True, False, False]
    assert (ledger.depth, events.lost()) == (3, 2)
    assert [(e.reason, e.generation_ids) for e in events if isinstance(e, RowsLost)] == [
        (LossReason.OUTBOX_FULL, ("gen_3",)),
        (LossReason.OUTBOX_FULL, ("gen_4",)),
    ]
    await ledger.close()
    assert events.written() == 3


@pytest.mark.asyncio
async def test_a_row_appended_after_closing_is_a_counted_loss(tmp_path: Path) -> None:
    events = Events()
    ledger = ledger_for(url_of(tmp_path / "l.db"), events)
    await ledger.open()
    await ledger.close()
    assert not ledger.append(row("gen_1"))
    assert events.lost() == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("bad", [{"output_tokens": 2**70}, {"tenant": None}, {"intent": "\ud800"}])
async def test_a_row_that_no_database_accepts_does_not_delay_the_others(
    tmp_path: Path, bad: dict[str, object]
) -> None:
    path, events = tmp_path / "l.db", Events()
    ledger = ledger_for(url_of(path), events)
    await ledger.open()
    ledger.append(row("gen_1"))
    ledger.append(row("gen_bad", **bad))
    ledger.append(row("gen_2"))
    await ledger.close()
    assert stored_ids(path) == ["gen_1", "gen_2"]
    assert (events.written(), events.lost()) == (2, 1)
    assert [(e.reason, e.generation_ids) for e in events if isinstance(e, RowsLost)] == [
        (LossReason.UNWRITABLE, ("gen_bad",))
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("no url at all s3cret", "is not a database url"),
        ("", "is not a database url"),
        ("mysql+aiomysql://u:s3cret@h/d", "'mysql\\+aiomysql'"),
        ("sqlite:///x.db", "'sqlite'"),
        ("sqlite+aiosqlite://h:port/s3cret", "is not a database url"),
    ],
)
async def test_a_url_that_can_never_work_stops_the_start_and_is_not_repeated(url: str, said: str) -> None:
    with pytest.raises(LedgerUnavailable, match=said) as caught:
        await ledger_for(url, Events()).open()
    assert "sqlite+aiosqlite" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.asyncio
async def test_libpqs_name_of_a_parameter_stops_the_start_and_the_drivers_name_is_told() -> None:
    pytest.importorskip("asyncpg")
    url = "postgresql+asyncpg://u:s3cret@127.0.0.1:9/d?sslmode=require"
    with pytest.raises(
        LedgerUnavailable, match=r"no parameter 'sslmode'; allowed: .* is ssl=require"
    ) as caught:
        await ledger_for(url, Events()).open()
    assert "s3cret" not in str(caught.value)


@pytest.mark.asyncio
async def test_reading_a_ledger_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    ledger = ledger_for(url_of(tmp_path / "nowhere" / "l.db"), Events())
    await ledger.open()
    with pytest.raises(LedgerUnavailable, match=r"cannot be read now \(OperationalError SQLITE_CANTOPEN\)"):
        await newest_rows(ledger)
    await ledger.close()


@pytest.mark.asyncio
async def test_the_writer_ends_by_itself_when_the_ledger_closes_while_it_rests(tmp_path: Path) -> None:
    events = Events()
    ledger = ledger_for(url_of(tmp_path / "nowhere" / "l.db"), events)
    await ledger.open()
    ledger.append(row("gen_1"))
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(ledger.run())
        await asyncio.sleep(0.05)
        await ledger.close(0.1)
    assert events.lost() == 1


class FlakyStore(GenerationStore):
    """A real store that fails as scripted: before the write, or after a commit that the caller never sees."""

    def __init__(self, url: str, script: list[str]) -> None:
        super().__init__(url)
        self.script = script

    async def write(self, batch: Sequence[UsageRow]) -> Sequence[UsageRow]:
        fault = self.script.pop(0) if self.script else "none"
        if fault == "before":
            raise ConnectionResetError
        refused = await super().write(batch)
        if fault == "after":
            raise ConnectionResetError
        return refused


@settings(max_examples=25, deadline=None)
@given(
    script=st.lists(st.sampled_from(["none", "before", "after"]), max_size=4),
    numbers=st.lists(st.integers(0, 12), max_size=20),
    batch_rows=st.integers(1, 7),
)
def test_every_generation_is_stored_exactly_once_whatever_fails_and_is_repeated(
    script: list[str], numbers: list[int], batch_rows: int
) -> None:
    async def scenario() -> None:
        events = Events()
        ledger = Ledger(
            "sqlite+aiosqlite://",
            LedgerOptions(
                emit=events.append,
                clock=time.monotonic,
                unix_time=time.time,
                batch_rows=batch_rows,
                first_retry_s=0.001,
            ),
            store=lambda url: FlakyStore(url, list(script)),
        )
        await ledger.open()
        for number in numbers:
            assert ledger.append(row(f"gen_{number}"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ledger.run())
            await until(lambda: ledger.depth == 0)
            assert ledger.healthy
            stored = [found.generation_id for found in await newest_rows(ledger)]
            await ledger.close()
        assert sorted(stored) == sorted({f"gen_{number}" for number in numbers})
        assert (events.written(), events.lost()) == (len(numbers), 0)

    asyncio.run(scenario())


def test_a_database_error_of_the_value_classes_is_the_rows_fault() -> None:
    class FromServer(Exception):
        sqlstate = "22021"

    class Down(Exception):
        sqlstate = "57P01"

    assert is_the_rows_fault(FromServer())
    assert not is_the_rows_fault(Down())


async def test_rows_that_come_together_share_a_transaction(tmp_path: Path) -> None:
    events = Events()
    async with running(ledger_for(url_of(tmp_path / "l.db"), events)) as ledger:
        for number in range(20):
            ledger.append(row(f"gen_{number}"))
            await asyncio.sleep(0)
        await until(lambda: events.written() == 20)
    written = [event.count for event in events if isinstance(event, RowsWritten)]
    assert sum(written) == 20
    assert len(written) <= 2  # the rows that came while the table was created, and the rest


async def test_a_full_batch_does_not_wait_for_more(tmp_path: Path) -> None:
    events = Events()
    patient = Ledger(
        url_of(tmp_path / "l.db"),
        LedgerOptions(
            emit=events.append, clock=time.monotonic, unix_time=time.time, batch_rows=5, gather_s=60.0
        ),
    )
    async with running(patient) as ledger:
        for number in range(5):
            ledger.append(row(f"gen_{number}"))
        await until(lambda: events.written() == 5)


async def test_a_small_outbox_is_written_before_it_is_full(tmp_path: Path) -> None:
    events = Events()
    patient = Ledger(
        url_of(tmp_path / "l.db"),
        LedgerOptions(
            emit=events.append, clock=time.monotonic, unix_time=time.time, outbox_rows=10, gather_s=60.0
        ),
    )
    async with running(patient) as ledger:
        for number in range(6):
            ledger.append(row(f"gen_{number}"))
        await until(lambda: events.written() == 6)
    assert events.lost() == 0


async def test_closing_does_not_wait_for_more_rows(tmp_path: Path) -> None:
    events = Events()
    patient = Ledger(
        url_of(tmp_path / "l.db"),
        LedgerOptions(emit=events.append, clock=time.monotonic, unix_time=time.time, gather_s=60.0),
    )
    async with asyncio.timeout(30), running(patient) as ledger:
        ledger.append(row("gen_1"))
        await asyncio.sleep(0.02)
    assert events.written() == 1


class HeldStore(GenerationStore):
    """A store whose writes wait for ``let_on``; ``sizes`` holds the number of rows of each batch."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.sizes: list[int] = []
        self.let_on = asyncio.Event()

    async def write(self, batch: Sequence[UsageRow]) -> Sequence[UsageRow]:
        if batch:
            self.sizes.append(len(batch))
            await self.let_on.wait()
        return await super().write(batch)


async def test_rows_that_come_during_a_write_wait_for_a_full_batch_too(tmp_path: Path) -> None:
    store, events = HeldStore(url_of(tmp_path / "l.db")), Events()
    options = LedgerOptions(
        emit=events.append, clock=time.monotonic, unix_time=time.time, batch_rows=4, gather_s=60.0
    )
    async with running(Ledger(url_of(tmp_path / "l.db"), options, store=lambda url: store)) as ledger:
        for number in range(4):
            ledger.append(row(f"gen_{number}"))
        await until(lambda: store.sizes == [4])
        ledger.append(row("gen_4"))
        store.let_on.set()
        await until(lambda: events.written() == 4)
        for number in range(5, 8):
            ledger.append(row(f"gen_{number}"))
        await until(lambda: events.written() == 8)
    assert store.sizes == [4, 4]
