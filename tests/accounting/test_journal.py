"""The journal: rows reach the disk before the answer is sent and are read back after any process death."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.account import Accounts
from accounting.errors import LedgerUnavailable, NotRecorded
from accounting.events import (
    JournalFailed,
    JournalIsBack,
    JournalRefusal,
    JournalRefused,
    JournalSynced,
    LossReason,
    RowsLost,
    RowsReplayed,
)
from accounting.journal import Journal, PendingRow
from accounting.journal_files import DAMAGED, SUFFIX, create, orphans
from accounting.journal_records import HEADER, NotEncodable, frame, read
from accounting.ledger import Ledger
from accounting.options import Durability, LedgerOptions
from accounting.values import UsageRow
from tests import fork_server
from tests.accounting.test_ledger import Events, locked, row, running, stored_ids, until, url_of
from tests.usage_rows import newest_rows

FULL = row(
    "gen_1", kind="shadow", org="o", user_id="u", intent="x", revision=3, ttft_ms=1.5, session_id="søster 漫",
    cost_nanousd=2**62, price_version="1",
)  # fmt: skip


def names() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"{next(numbers):06d}"


def journaled(
    folder: Path,
    events: Events,
    *,
    durability: Durability = Durability.GROUP,
    outbox_rows: int = 10_000,
    journal_bytes: int = 1 << 30,
    name: str = "a",
) -> Ledger:
    new_name = names()
    return Ledger(
        url_of(folder / "l.db"),
        LedgerOptions(
            emit=events.append,
            clock=time.monotonic,
            unix_time=time.time,
            outbox_rows=outbox_rows,
            first_retry_s=0.01,
            durability=durability,
            journal_folder=folder / "journal",
            journal_bytes=journal_bytes,
            sync_wait_s=30.0,  # so long that a busy disk does not count as failed
            new_name=lambda: f"{new_name()}-{name}",
            adopt_s=0.05,
            journal_rest_s=0.05,
        ),
    )


def files(folder: Path) -> list[Path]:
    return sorted((folder / "journal").glob(f"*{SUFFIX}"))


def journaled_ids(folder: Path) -> list[str]:
    """The generation ids of the rows in all journal files."""
    return [one.generation_id for path in files(folder) for one in read(path.read_bytes()).rows]


def leave_journal(folder: Path, *rows: UsageRow, name: str = "0", tail: bytes = b"") -> None:
    """Write the journal file that a killed process leaves."""
    (folder / "journal").mkdir(exist_ok=True)
    segment = create(folder / "journal", lambda: name)
    segment.write(b"".join(map(frame, rows)) + tail)
    segment.release()


# Encoding of rows


def test_a_row_comes_back_from_its_bytes_as_it_was() -> None:
    assert read(HEADER + frame(FULL)).rows == (FULL,)


@given(cut=st.integers(0, 5_000))
def test_a_file_cut_off_anywhere_gives_its_whole_rows_and_is_not_called_damaged(cut: int) -> None:
    rows = tuple(row(f"gen_{number}", intent="x" * number) for number in range(6))
    whole = HEADER + b"".join(map(frame, rows))
    found = read(whole[:cut])
    assert found.rows == rows[: len(found.rows)] and not found.damaged
    assert sum(len(frame(one)) for one in found.rows) + found.torn_bytes + len(HEADER) >= min(cut, len(whole))
    assert len(found.rows) == 6 or cut < len(whole)


@given(at=st.integers(0, 1_500), value=st.integers(1, 255))
def test_a_changed_byte_never_makes_another_row(at: int, value: int) -> None:
    rows = tuple(row(f"gen_{number}", output_tokens=number) for number in range(3))
    data = bytearray(HEADER + b"".join(map(frame, rows)))
    data[at % len(data)] ^= value
    found = read(bytes(data))
    assert found.rows == rows[: len(found.rows)]
    assert len(found.rows) < 3 and (found.damaged or found.torn_bytes)


@given(number=st.integers(0, 2), at=st.integers(0, 3), value=st.integers(1, 255))
def test_a_row_whose_length_was_changed_is_no_row_that_was_cut_off(number: int, at: int, value: int) -> None:
    rows = tuple(row(f"gen_{number}") for number in range(3))
    data = bytearray(HEADER + b"".join(map(frame, rows)))
    data[len(HEADER) + number * len(frame(rows[0])) + at] ^= value
    found = read(bytes(data))
    assert found.rows == rows[:number] and found.damaged


def test_zeros_after_the_rows_come_from_a_power_cut_and_are_no_damage() -> None:
    found = read(HEADER + frame(FULL) + bytes(4096))
    assert (found.rows, found.torn_bytes, found.damaged) == ((FULL,), 4096, False)


def test_a_row_of_an_older_version_has_the_defaults_of_this_one() -> None:
    import msgspec

    old = msgspec.structs.asdict(row("gen_1"))
    for name in ("kind", "org", "user_id", "model", "cost_nanousd", "billable_input_tokens"):
        del old[name]
    payload = msgspec.msgpack.encode({**old, "dropped_since": 1})
    import struct
    import zlib

    data = HEADER + struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
    assert read(data).rows == (row("gen_1"),)


def test_a_row_takes_no_room_for_fields_that_have_their_default() -> None:
    assert b"fallback_reason" not in frame(row("gen_1"))
    assert b"fallback_reason" in frame(row("gen_1", fallback_reason="timeout"))
    assert read(HEADER + frame(row("gen_1"))).rows == (row("gen_1"),)


@pytest.mark.parametrize("bad", [{"output_tokens": 2**70}, {"intent": "\ud800"}, {"intent": "x" * (2 << 20)}])
def test_a_row_that_cannot_be_encoded_raises_not_encodable(bad: dict[str, object]) -> None:
    with pytest.raises(NotEncodable):
        frame(row("gen_1", **bad))


# Before the answer is sent


async def test_a_row_is_on_the_disk_when_its_answer_may_go_out(tmp_path: Path) -> None:
    async with running(journaled(tmp_path, Events())) as ledger:
        for number in range(5):
            ledger.append(row(f"gen_{number}"))
            assert await ledger.durable()
            assert journaled_ids(tmp_path) == [f"gen_{one}" for one in range(number + 1)]


async def test_rows_that_come_together_share_a_sync(tmp_path: Path) -> None:
    events = Events()
    async with running(journaled(tmp_path, events)) as ledger:

        async def answer(number: int) -> None:
            ledger.append(row(f"gen_{number}"))
            assert await ledger.durable()
            assert f"gen_{number}" in journaled_ids(tmp_path)

        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(answer(number))
    synced = [event.rows for event in events if isinstance(event, JournalSynced)]
    assert sum(synced) == 100 and len(synced) <= 10


async def test_rows_that_come_soon_after_a_sync_share_the_next(tmp_path: Path) -> None:
    events = Events()
    options = LedgerOptions(emit=events.append, clock=time.monotonic, unix_time=time.time, sync_gap_s=2.0)
    journal = Journal(tmp_path / "journal", options, on_lost=lambda _: None)
    journal.open()
    journal.append(PendingRow(row("gen_1"), 0.0))
    assert await journal.durable()
    for number in (2, 3):
        journal.append(PendingRow(row(f"gen_{number}"), 0.0))
        for _ in range(5):
            await asyncio.sleep(0)
    assert journaled_ids(tmp_path) == ["gen_1"]
    assert await journal.durable() and journaled_ids(tmp_path) == ["gen_1", "gen_2", "gen_3"]
    await journal.close()
    assert [event.rows for event in events if isinstance(event, JournalSynced)] == [1, 2]


async def test_cancelling_one_wait_for_a_sync_does_not_cancel_the_others(tmp_path: Path) -> None:
    async with running(journaled(tmp_path, Events())) as ledger, asyncio.TaskGroup() as tasks:
        ledger.append(row("gen_1"))
        accounts = Accounts(ledger)
        left, stays = tasks.create_task(accounts.durable()), tasks.create_task(accounts.durable())
        await asyncio.sleep(0)
        left.cancel()
        await stays
        assert left.cancelled() and journaled_ids(tmp_path) == ["gen_1"]


async def test_relaxed_waits_for_nothing_but_journals_all_the_same(tmp_path: Path) -> None:
    events = Events()
    async with running(journaled(tmp_path, events, durability=Durability.RELAXED)) as ledger:
        ledger.append(row("gen_1"))
        assert await ledger.durable() and journaled_ids(tmp_path) == []
        await until(lambda: any(isinstance(event, JournalSynced) for event in events))


async def test_memory_makes_no_journal(tmp_path: Path) -> None:
    async with running(journaled(tmp_path, Events(), durability=Durability.MEMORY)) as ledger:
        ledger.append(row("gen_1"))
        assert await ledger.durable() and ledger.accepts
    assert not (tmp_path / "journal").exists()
    assert stored_ids(tmp_path / "l.db") == ["gen_1"]


async def test_a_folder_that_cannot_be_made_stops_the_start_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(LedgerUnavailable, match=r"ledger.journal_folder: .*journal cannot be made"):
        await journaled(tmp_path, Events()).open()


async def test_a_journal_whose_rows_are_written_leaves_no_file(tmp_path: Path) -> None:
    async with running(journaled(tmp_path, Events())) as ledger:
        ledger.append(row("gen_1"))
        await ledger.durable()
    assert stored_ids(tmp_path / "l.db") == ["gen_1"]
    assert list((tmp_path / "journal").iterdir()) == []


# After the death of a process


async def test_what_a_killed_process_left_is_written_by_the_next(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys, time\n"
        "from pathlib import Path\n"
        "from tests.accounting.test_journal import journaled\n"
        "from tests.accounting.test_ledger import Events, row\n"
        "async def main():\n"
        f"    ledger = journaled(Path({str(tmp_path)!r}), Events(), name='killed')\n"
        "    await ledger.open()\n"
        "    for number in range(50):\n"
        "        ledger.append(row(f'gen_{number}'))\n"
        "    assert await ledger.durable()\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).parents[2]
    done = await asyncio.to_thread(fork_server.run, [sys.executable, "-c", program], cwd=root, timeout=60)
    assert done.returncode == -9
    assert stored_ids(tmp_path / "l.db") == [] and len(journaled_ids(tmp_path)) == 50
    events = Events()
    async with running(journaled(tmp_path, events)):
        await until(lambda: any(isinstance(event, RowsReplayed) for event in events))
    assert sorted(stored_ids(tmp_path / "l.db")) == sorted(f"gen_{number}" for number in range(50))
    assert list((tmp_path / "journal").iterdir()) == []


async def test_a_running_process_adopts_the_file_of_one_that_died(tmp_path: Path) -> None:
    events = Events()
    async with running(journaled(tmp_path, events)):
        await asyncio.sleep(0)
        leave_journal(tmp_path, row("gen_1"), name="000009-other")
        await until(lambda: any(isinstance(event, RowsReplayed) and event.adopted for event in events))
        assert stored_ids(tmp_path / "l.db") == ["gen_1"]


async def test_a_journal_which_may_have_20_000_rows_is_decoded_outside_the_event_loop(tmp_path: Path) -> None:
    leave_journal(tmp_path, row("gen_1"))
    decoders: list[int] = []

    def note(frame: FrameType, event: str, value: object) -> None:
        if event == "call" and frame.f_code is read.__code__:
            decoders.append(threading.get_ident())

    events = Events()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        async with running(journaled(tmp_path, events)):
            await until(lambda: any(isinstance(event, RowsReplayed) for event in events))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert decoders and threading.get_ident() not in decoders


async def test_files_of_ended_processes_count_towards_the_limit_until_the_database_has_their_rows(
    tmp_path: Path,
) -> None:
    events = Events()
    left = len(HEADER) + len(frame(row("gen_1")))
    async with running(journaled(tmp_path, events, journal_bytes=left + 10)) as ledger:
        with locked(tmp_path / "l.db"):
            leave_journal(tmp_path, row("gen_1"))
            await until(lambda: ledger.journal_bytes == left)
            assert ledger.append(row("gen_2")) and await ledger.durable()
            assert any(isinstance(event, JournalRefused) for event in events)
            assert journaled_ids(tmp_path) == ["gen_1"]
        await until(lambda: ledger.journal_bytes == 0)
    assert sorted(stored_ids(tmp_path / "l.db")) == ["gen_1", "gen_2"]


async def test_a_file_whose_process_lives_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    living = create(tmp_path / "journal", lambda: "living")
    living.write(frame(row("gen_1")))
    assert list(orphans(tmp_path / "journal")) == []
    living.release()
    [orphan] = orphans(tmp_path / "journal")
    assert list(orphans(tmp_path / "journal")) == []  # this process holds its lock now
    orphan.remove()
    assert list(orphans(tmp_path / "journal")) == []


async def test_rows_that_were_written_before_the_death_are_not_billed_again(tmp_path: Path) -> None:
    async with running(journaled(tmp_path, Events())) as ledger:
        ledger.append(row("gen_1", output_tokens=5))
    leave_journal(tmp_path, row("gen_1", output_tokens=5), row("gen_2"))
    events = Events()
    async with running(journaled(tmp_path, events)) as ledger:
        await until(lambda: any(isinstance(event, RowsReplayed) for event in events))
        assert sorted(one.generation_id for one in await newest_rows(ledger)) == ["gen_1", "gen_2"]


async def test_half_a_row_at_the_end_costs_only_itself(tmp_path: Path) -> None:
    leave_journal(tmp_path, row("gen_1"), tail=frame(row("gen_2"))[:-1])
    events = Events()
    async with running(journaled(tmp_path, events)):
        await until(lambda: any(isinstance(event, RowsReplayed) for event in events))
    [replayed] = [event for event in events if isinstance(event, RowsReplayed)]
    assert (replayed.count, replayed.damaged_bytes) == (1, 0)
    assert stored_ids(tmp_path / "l.db") == ["gen_1"] and not files(tmp_path)


async def test_a_damaged_file_gives_what_can_be_read_and_is_set_aside(tmp_path: Path) -> None:
    bad = bytearray(frame(row("gen_2")))
    bad[20] ^= 1
    leave_journal(tmp_path, row("gen_1"), tail=bytes(bad) + frame(row("gen_3")))
    events = Events()
    async with running(journaled(tmp_path, events)):
        await until(lambda: any(isinstance(event, RowsReplayed) for event in events))
    [replayed] = [event for event in events if isinstance(event, RowsReplayed)]
    assert (replayed.count, replayed.damaged_bytes) == (1, len(bad) + len(frame(row("gen_3"))))
    assert [path.name for path in (tmp_path / "journal").iterdir()] == [f"0{SUFFIX}{DAMAGED}"]


def test_a_file_that_a_killed_process_did_not_finish_is_removed_after_a_minute(tmp_path: Path) -> None:
    young, old = (tmp_path / f"{name}{SUFFIX}.new" for name in ("young", "old"))
    young.touch()
    old.touch()
    os.utime(old, (time.time() - 61, time.time() - 61))
    assert list(orphans(tmp_path)) == []
    assert young.exists() and not old.exists()


def test_files_are_created_while_another_process_looks_for_orphans(tmp_path: Path) -> None:
    names_ = names()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for segment in orphans(tmp_path):
                segment.release()

    lookers = [threading.Thread(target=look) for _ in range(3)]
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # the lookers are between any two calls of a creation more often
    for looker in lookers:
        looker.start()
    try:
        for _ in range(150):
            create(tmp_path, names_).remove()
    finally:
        sys.setswitchinterval(usual_s)
        ended.set()
        for looker in lookers:
            looker.join()


# While the database is unavailable


async def test_rows_of_a_process_that_ended_have_waited_since_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    leave_journal(tmp_path / "other", row("gen_1"))
    [left] = files(tmp_path / "other")
    os.utime(left, (time.time() - 300.0,) * 2)
    async with running(journaled(tmp_path, Events())) as ledger:
        await until(lambda: (tmp_path / "l.db").exists())
        with locked(tmp_path / "l.db"):
            left.rename(tmp_path / "journal" / left.name)
            await until(lambda: ledger.lag_s > 0)
            assert 300.0 <= ledger.lag_s < 600.0
        await until(lambda: ledger.lag_s == 0, at_most_s=15)


async def test_rows_beyond_memory_wait_in_the_journal_and_none_is_lost(tmp_path: Path) -> None:
    events = Events()
    async with running(journaled(tmp_path, events, outbox_rows=3)) as ledger:
        await until(lambda: (tmp_path / "l.db").exists())
        with locked(tmp_path / "l.db"):
            for number in range(60):
                assert ledger.append(row(f"gen_{number}"))
                await ledger.durable()
            assert ledger.depth == 3 and ledger.lag_s > 0
        await until(lambda: len(stored_ids(tmp_path / "l.db")) == 60, at_most_s=15)
        await until(lambda: ledger.lag_s == 0, at_most_s=15)
    assert events.lost() == 0
    assert list((tmp_path / "journal").iterdir()) == []


async def test_what_closing_cannot_write_stays_for_the_next_start(tmp_path: Path) -> None:
    events = Events()
    ledger = journaled(tmp_path, events)
    await ledger.open()
    with locked(tmp_path / "l.db"):
        for number in range(30):
            ledger.append(row(f"gen_{number}"))
        await ledger.durable()
        await ledger.close(0.1)
    assert events.lost() == 0 and len(journaled_ids(tmp_path)) == 30
    async with running(journaled(tmp_path, Events(), name="b")):
        await until(lambda: len(stored_ids(tmp_path / "l.db")) == 30)


# When the disk fails


async def test_a_full_journal_is_told_and_the_row_reaches_the_database_all_the_same(tmp_path: Path) -> None:
    events = Events()
    async with running(
        journaled(tmp_path, events, journal_bytes=len(HEADER) + len(frame(row("gen_1"))))
    ) as ledger:
        assert ledger.append(row("gen_1")) and await ledger.durable()
        assert ledger.append(row("gen_2")) and await ledger.durable()
    assert [event.reason for event in events if isinstance(event, JournalRefused)] == [JournalRefusal.FULL]
    assert sorted(stored_ids(tmp_path / "l.db")) == ["gen_1", "gen_2"]


@pytest.mark.parametrize("durability", [Durability.GROUP, Durability.STRICT])
async def test_a_failing_disk_stops_answers_only_with_strict_durability(
    tmp_path: Path, durability: Durability
) -> None:
    events = Events()
    async with running(journaled(tmp_path, events, durability=durability)) as ledger:
        goes_on = durability is Durability.GROUP
        shutil.rmtree(tmp_path / "journal")
        (tmp_path / "journal").write_text("in the way")
        ledger.append(row("gen_1"))
        assert await ledger.durable() is goes_on
        assert any(isinstance(event, JournalFailed) for event in events)
        assert ledger.accepts is goes_on and not ledger.journal_working
        await asyncio.sleep(0.2)
        assert ledger.accepts is goes_on and not ledger.journal_working, "it still fails"
        # Until the journal works again no answer waits for it.
        ledger.append(row("gen_2"))
        assert await ledger.durable() is goes_on
        if not goes_on:
            with pytest.raises(NotRecorded), Accounts(ledger).open(row("gen_3")):
                raise AssertionError("the work was begun")
        (tmp_path / "journal").unlink()
        (tmp_path / "journal").mkdir()
        await working_again(ledger)
        assert ledger.accepts
        ledger.append(row("gen_4"))
        assert await ledger.durable() and ledger.journal_working
        assert journaled_ids(tmp_path) == ["gen_4"]
    assert sorted(stored_ids(tmp_path / "l.db")) == ["gen_1", "gen_2", "gen_4"]
    assert events.lost() == 0


async def test_a_disk_that_fills_up_ends_its_file_and_the_next_row_begins_another(tmp_path: Path) -> None:
    events = Events()
    async with running(journaled(tmp_path, events)) as ledger:
        assert ledger.append(row("gen_1")) and await ledger.durable()
        fill_the_disk(tmp_path)
        assert ledger.append(row("gen_2")) and await ledger.durable()
        assert not ledger.journal_working
        [failed] = [event for event in events if isinstance(event, JournalFailed)]
        assert (failed.error_type, failed.rows) == ("OSError ENOSPC", 1)
        assert not any(isinstance(event, JournalIsBack) for event in events)
        await working_again(ledger)
        assert ledger.append(row("gen_3")) and await ledger.durable() and ledger.journal_working
        assert sum([isinstance(event, JournalIsBack) for event in events]) == 1
        assert "gen_3" in journaled_ids(tmp_path) and "gen_2" not in journaled_ids(tmp_path)
    assert sorted(stored_ids(tmp_path / "l.db")) == ["gen_1", "gen_2", "gen_3"]
    assert events.lost() == 0 and files(tmp_path) == []


async def test_a_file_that_was_begun_after_a_failure_and_holds_no_row_is_removed(tmp_path: Path) -> None:
    async with running(journaled(tmp_path, Events())) as ledger:
        assert ledger.append(row("gen_1")) and await ledger.durable()
        fill_the_disk(tmp_path)
        assert ledger.append(row("gen_2")) and await ledger.durable()
        await working_again(ledger)
    assert sorted(stored_ids(tmp_path / "l.db")) == ["gen_1", "gen_2"] and files(tmp_path) == []


async def working_again(ledger: Ledger) -> None:
    async with asyncio.timeout(30):
        while not ledger.journal_working:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def fill_the_disk(folder: Path) -> None:
    """Make every further write to the journal's file fail."""
    [path] = files(folder)
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError), open("/dev/full", "wb") as full:
            if one.readlink() == path:
                os.dup2(full.fileno(), int(one.name))


async def test_with_neither_memory_nor_disk_a_row_is_lost_and_told(tmp_path: Path) -> None:
    events = Events()
    async with running(journaled(tmp_path, events, outbox_rows=1), close_s=30.0) as ledger:
        shutil.rmtree(tmp_path / "journal")
        (tmp_path / "journal").write_text("in the way")
        await until(lambda: (tmp_path / "l.db").exists())
        with locked(tmp_path / "l.db"):
            assert ledger.append(row("gen_1"))
            assert ledger.append(row("gen_2"))  # the journal accepts it, then fails
            await ledger.durable()
            assert not ledger.append(row("gen_3"))
    lost = [event for event in events if isinstance(event, RowsLost)]
    assert [(event.reason, event.generation_ids) for event in lost] == [
        (LossReason.OUTBOX_FULL, ("gen_2",)),
        (LossReason.OUTBOX_FULL, ("gen_3",)),
    ]


@settings(deadline=None, max_examples=20)
@given(steps=st.lists(st.sampled_from(["append", "wait", "die", "away", "back"]), max_size=25))
def test_whatever_happens_every_row_that_was_waited_for_is_in_the_database_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    folder, events = tmp_path_factory.mktemp("ledger"), Events()

    async def live() -> set[str]:
        appended, waited, lives = itertools.count(), set[str](), itertools.count()

        def begin() -> Ledger:
            return journaled(folder, events, outbox_rows=2, name=f"life{next(lives)}")

        ledger, lock = begin(), None
        await ledger.open()
        taken: list[str] = []
        for step in steps:
            if step == "append":
                taken.append(f"gen_{next(appended)}")
                ledger.append(row(taken[-1]))
            elif step == "wait":
                assert await ledger.durable()
                waited.update(taken)
            elif step == "die":
                # A dead process leaves only its files, without their locks.
                if ledger._journal is not None:
                    for segment in ledger._journal._segments:
                        segment.release()
                    ledger._journal._segments.clear()
                ledger._writer.take_remaining()
                await ledger.close(0.05)
                ledger, taken = begin(), []
                await ledger.open()
            elif step == "away" and lock is None:
                lock = locked(folder / "l.db")
                lock.__enter__()
            elif step == "back" and lock is not None:
                lock.__exit__(None, None, None)
                lock = None
        if lock is not None:
            lock.__exit__(None, None, None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ledger.run())
            await until(lambda: waited <= set(stored_ids(folder / "l.db")), at_most_s=10)
            await ledger.close()
        return waited

    waited = asyncio.run(live())
    stored = stored_ids(folder / "l.db")
    assert waited <= set(stored) and len(stored) == len(set(stored))
