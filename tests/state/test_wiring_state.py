"""The state store of a gateway: when it counts as ready, and what a start needs."""

from __future__ import annotations

import asyncio
import resource
import stat
import time
from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.config.settings import load_settings
from gateway.config.state import StateConfig
from gateway.state.idempotency import Claim
from gateway.state.local_copy import LocalCopy
from gateway.state.port import Record
from gateway.state.projection import ProjectionState
from gateway.wiring.state import StateParts, make_state
from ops.cli.doctor import records_lost
from tests.state.conftest import until
from tests.state.servers import free_port, redis_server

SHARED_MEMORY_BYTES = 32_768  # of the `-shm` file, without which SQLite reads no file


def state_of(url: str, cache_dir: Path | None = None) -> StateParts:
    config = StateConfig(url=url, cache_dir=None if cache_dir is None else str(cache_dir), poll_seconds=0.05)
    return make_state(config, clock=time.monotonic, unix_time=time.time)


async def test_a_local_file_that_cannot_be_read_makes_a_gateway_not_ready_until_it_can(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.db"
    path.write_text("no database" * 1_000)
    state = state_of(f"sqlite:///{path}")
    await state.open()
    assert not state.ready and not state.store.healthy
    async with asyncio.TaskGroup() as group:
        loop = group.create_task(state.run())
        path.unlink()
        await until(lambda: state.ready)
        path.unlink()
        path.write_text("no database" * 1_000)
        await until(lambda: not state.ready)
        loop.cancel()
    await state.close()


async def test_a_disk_that_is_full_before_the_first_idempotency_key_still_shows_that_the_key_is_new(
    tmp_path: Path,
) -> None:
    state = state_of(f"sqlite:///{tmp_path}/state.db")
    await state.open()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SHARED_MEMORY_BYTES, hard))
        assert await state.idempotency.get("t", "key", Claim("1", "f"), reads_only=True) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await state.close()


async def test_a_shared_store_makes_a_gateway_not_ready_until_it_was_reached_or_has_a_local_copy(
    tmp_path: Path,
) -> None:
    with redis_server(tmp_path / "redis") as server:
        seen: list[int] = []
        state = state_of(server.url, tmp_path / "copies")
        state.follow("s", lambda record: seen.append(record.number))
        await state.open()
        async with asyncio.TaskGroup() as group:
            loop = group.create_task(state.run())
            await state.store.append("s", b"1", author="ann")
            await until(lambda: seen == [1] and any((tmp_path / "copies").rglob("s.jsonl")))
            await asyncio.to_thread(server.kill)
            await until(lambda: not state.store.healthy)
            assert state.ready and state.figures()[1]["s"][0] == 1
            loop.cancel()
        await state.close()

        nothing = state_of(server.url, tmp_path / "other copies")
        nothing.follow("s", _ignore)
        later: list[int] = []
        held = state_of(server.url, tmp_path / "copies")
        follower = held.follow("s", lambda record: later.append(record.number))
        for one, ready in ((nothing, False), (held, True)):
            await one.open()
            assert one.ready is ready and not one.store.healthy
        assert later == [1] and follower.state is ProjectionState.AWAY
        for one in (nothing, held):
            await one.close()


async def test_a_missing_redis_does_not_stop_the_start_and_its_password_is_not_shown() -> None:
    state = state_of(f"redis://:s3cret@127.0.0.1:{free_port()}")
    await state.open()
    assert not state.ready and "s3cret" not in state.url.shown
    await state.close()


def test_a_url_of_something_else_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"state\.url"):
        state_of("mysql://:s3cret@host")


def _ignore(record: Record) -> None:
    """Apply nothing; these tests check only the follower."""


async def test_a_deleted_file_does_not_come_back_from_its_copies(tmp_path: Path) -> None:
    path = tmp_path / "sluice.db"
    config = StateConfig(url=f"sqlite:///{path}")
    before = make_state(config, clock=time.monotonic, unix_time=time.time)
    assert before.copies is not None
    copy = LocalCopy(before.copies, "routing")
    await before.open()
    record = await before.store.append("routing", b"{}", author="ann")
    await before.close()
    assert copy.extend([record])

    kept = make_state(config, clock=time.monotonic, unix_time=time.time)
    assert copy.head() == 1, "the file is there, so its copies are used"
    await kept.close()
    path.unlink()
    make_state(config, clock=time.monotonic, unix_time=time.time)
    assert copy.head() == 0


async def test_a_start_is_refused_while_the_files_folder_cannot_be_made_and_there_are_no_copies(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    url, copies = f"sqlite:///{tmp_path}/file/state.db", tmp_path / "copies"
    lost = state_of(url, copies)
    with pytest.raises(ConfigError, match=r"state\.url: the folder .*/file cannot be made"):
        await lost.open()
    assert lost.copies is not None
    lost.copies.mkdir(parents=True)
    await lost.open()
    made = state_of(f"sqlite:///{tmp_path}/new/state.db")
    await made.open()
    assert made.ready
    for state in (lost, made):
        await state.close()


async def test_the_folder_of_the_state_is_made_for_its_owner_only(tmp_path: Path) -> None:
    folder, shared = tmp_path / "made", tmp_path / "given"
    shared.mkdir(mode=0o750)
    for one in (folder, shared):
        state = state_of(f"sqlite:///{one}/state.db")
        await state.open()
        await state.close()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, shared)] == [0o700, 0o750]


async def test_doctor_says_of_which_stream_the_store_has_lost_records(tmp_path: Path) -> None:
    (tmp_path / "state.db").touch()
    state = state_of(f"sqlite:///{tmp_path / 'state.db'}", tmp_path / "copies")
    for stream in ("routing", "keys"):
        state.follow(stream, lambda record: None)
    assert state.copies is not None
    LocalCopy(state.copies, "routing").extend([Record("routing", 1, 0.0, "ann", b"{}")])
    await state.open()
    [check] = records_lost(state)
    assert (check.check, check.ok) == ("state routing", False) and "docs/state.md" in check.hint
    await state.close()


def test_everything_is_in_one_folder() -> None:
    settings = load_settings(None, {})
    assert settings.state.url == "sqlite:///state/sluice.db"
    assert settings.ledger.url == "sqlite+aiosqlite:///state/sluice.db"
    assert settings.ledger.folder == Path("state/sluice.db.journal")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "postgresql+asyncpg://ann:s3cret@db:5432/sluice?ssl=require",
            "postgresql+asyncpg://ann@db:5432/sluice",
        ),
        ("postgresql+asyncpg://ann@db/sluice?password=s3cret", "postgresql+asyncpg://ann@db/sluice"),
        ("sqlite+aiosqlite:////var/lib/ledger.db", "sqlite+aiosqlite:////var/lib/ledger.db"),
        ("ann:s3cret", "no database url"),
    ],
)
def test_the_ledgers_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert load_settings(None, {"SLUICE_LEDGER__URL": url}).ledger.shown == shown


async def test_a_store_that_is_read_and_takes_no_writes_is_down_in_the_metrics(tmp_path: Path) -> None:
    state = state_of(f"sqlite:///{tmp_path / 'state.db'}")
    await state.open()
    assert state.figures()[0] is True
    state.store.refuses_writes = True
    assert state.figures()[0] is False and state.ready
    await state.close()
