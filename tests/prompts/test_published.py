from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompts.published import PromptChanged, Publishing, publish_hashes
from gateway.prompts.versions import PromptVersions
from gateway.state.errors import StateUnavailable
from gateway.state.memory import MemoryStateStore
from gateway.state.port import StateStore
from gateway.state.sqlite_store import SqliteStateStore
from ops.cli.startup import start_errors

NOW = datetime(2026, 11, 18, 14, 13, 20, tzinfo=UTC).timestamp()


def folder(path: Path, **texts: str) -> PromptVersions:
    path.mkdir(exist_ok=True)
    for old in path.glob("*.yaml"):
        old.unlink()
    for version_id, text in texts.items():
        (path / f"{version_id}.yaml").write_text(f"id: {version_id}\nsystem: {text}\n", encoding="utf-8")
    return PromptVersions.from_folder(path)


def publishing(versions: PromptVersions, store: StateStore, at: float = NOW) -> Publishing:
    return Publishing(versions, store, unix_time=lambda: at)


@asynccontextmanager
async def on_a_file(path: Path) -> AsyncIterator[StateStore]:
    store = SqliteStateStore(path, unix_time=time.time, busy_timeout_s=30.0)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StateStore]:
    if request.param == "memory":
        yield MemoryStateStore(unix_time=time.time)
    else:
        async with on_a_file(tmp_path / "state.db") as kept:
            yield kept


async def test_a_new_id_is_published_and_the_same_text_starts_again(
    store: StateStore, tmp_path: Path
) -> None:
    versions = folder(tmp_path / "p", v1="Hi.")
    first = publishing(versions, store)
    assert first.published_at("v1") is None
    await first.publish()
    again = publishing(versions, store, NOW + 1e6)
    await again.publish()
    assert first.published_at("v1") == again.published_at("v1") == "2026-11-18T14:13:20+00:00"


async def test_another_text_under_a_published_id_is_refused_with_both_hashes_and_what_to_do(
    store: StateStore, tmp_path: Path
) -> None:
    old = folder(tmp_path / "p", v1="Hi.", v2="Ho.")
    await publishing(old, store).publish()
    new = folder(tmp_path / "p", v1="Changed.", v2="Ho.")
    with pytest.raises(PromptChanged) as caught:
        await publishing(new, store).publish()
    message = str(caught.value)
    assert old.get("v1").sha256 in message and new.get("v1").sha256 in message
    assert "v1.yaml" in message and "2026-11-18" in message and "give the new text a new id" in message
    assert "v2" not in message and len(message.splitlines()) == 1
    assert list(start_errors(caught.value)) == [caught.value]


async def test_a_refused_start_publishes_nothing_over_the_old_text(store: StateStore, tmp_path: Path) -> None:
    old = folder(tmp_path / "p", v1="Hi.")
    await publishing(old, store).publish()
    with pytest.raises(PromptChanged):
        await publishing(folder(tmp_path / "p", v1="Changed."), store).publish()
    await publishing(folder(tmp_path / "p", v1="Hi."), store).publish()


async def test_an_id_stays_published_when_its_file_goes_away(store: StateStore, tmp_path: Path) -> None:
    await publishing(folder(tmp_path / "p", v1="Hi."), store).publish()
    await publishing(folder(tmp_path / "p"), store).publish()
    with pytest.raises(PromptChanged):
        await publishing(folder(tmp_path / "p", v1="Changed."), store).publish()


async def test_checking_publishes_nothing(store: StateStore, tmp_path: Path) -> None:
    assert await publishing(folder(tmp_path / "p", v1="Hi."), store).check() == 0
    changed = publishing(folder(tmp_path / "p", v1="Changed."), store)
    await changed.publish()
    assert await changed.check() == 1
    with pytest.raises(PromptChanged):
        await publishing(folder(tmp_path / "p", v1="Hi."), store).check()


async def test_a_gateway_starts_when_the_store_is_away_but_a_check_says_so(tmp_path: Path) -> None:
    versions = folder(tmp_path / "p", v1="Hi.")
    (tmp_path / "text").write_text("this is no database" * 100)
    async with (
        on_a_file(tmp_path / "no" / "such" / "folder" / "state.db") as nowhere,
        on_a_file(tmp_path / "text") as no_database,
    ):
        for store in (nowhere, no_database):
            asked = publishing(versions, store)
            await asked.publish()
            assert asked.published_at("v1") is None
            with pytest.raises(StateUnavailable):
                await asked.check()


async def test_of_processes_that_publish_at_once_all_see_the_same_first_text(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(on_a_file(tmp_path / "state.db")) for _ in range(6)]
        seen = await asyncio.gather(
            *(publish_hashes(store, {"v1": f"{number:064}"}, at=NOW) for number, store in enumerate(stores))
        )
    assert len({one["v1"].sha256 for one in seen}) == 1


@given(
    steps=st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), max_size=3), max_size=6)
)
async def test_whatever_is_published_in_whatever_order_the_first_text_of_an_id_stays(
    steps: list[dict[str, str]],
) -> None:
    first: dict[str, str] = {}
    store = MemoryStateStore(unix_time=time.time)
    for hashes in steps:
        for version_id, sha256 in hashes.items():
            first.setdefault(version_id, sha256)
        kept = await publish_hashes(store, hashes, at=NOW)
        assert {name: one.sha256 for name, one in kept.items()} == first
