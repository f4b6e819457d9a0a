from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.startup import start_errors
from gateway.prompts.published import (
    PromptChanged,
    Published,
    PublishedStore,
    Publishing,
    SqlitePublished,
    StoreUnreachable,
)
from gateway.prompts.versions import PromptVersions

NOW = datetime(2026, 11, 18, 14, 13, 20, tzinfo=UTC).timestamp()


class MemoryPublished:
    """A store that is a dict; ``broken`` makes it fail."""

    def __init__(self, *, broken: bool = False) -> None:
        self.kept: dict[str, Published] = {}
        self.broken = broken

    def read(self) -> Mapping[str, Published]:
        return self.publish({}, at=0.0)

    def publish(self, hashes: Mapping[str, str], *, at: float) -> Mapping[str, Published]:
        if self.broken:
            raise StoreUnreachable("the disk is gone")
        for version_id, sha256 in hashes.items():
            self.kept.setdefault(version_id, Published(sha256, at))
        return dict(self.kept)


def folder(path: Path, **texts: str) -> PromptVersions:
    path.mkdir(exist_ok=True)
    for old in path.glob("*.yaml"):
        old.unlink()
    for version_id, text in texts.items():
        (path / f"{version_id}.yaml").write_text(f"id: {version_id}\nsystem: {text}\n", encoding="utf-8")
    return PromptVersions.from_folder(path)


def publishing(versions: PromptVersions, store: PublishedStore, at: float = NOW) -> Publishing:
    return Publishing(versions, store, unix_time=lambda: at)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> PublishedStore:
    if request.param == "memory":
        return MemoryPublished()
    return SqlitePublished(f"sqlite:///{tmp_path}/state.db")


def test_a_new_id_is_published_and_the_same_text_starts_again(store: PublishedStore, tmp_path: Path) -> None:
    versions = folder(tmp_path / "p", v1="Hi.")
    first = publishing(versions, store)
    assert first.published_at("v1") is None
    first.publish()
    again = publishing(versions, store, NOW + 1e6)
    again.publish()
    assert first.published_at("v1") == again.published_at("v1") == "2026-11-18T14:13:20+00:00"


def test_another_text_under_a_published_id_is_refused_with_both_hashes_and_what_to_do(
    store: PublishedStore, tmp_path: Path
) -> None:
    old = folder(tmp_path / "p", v1="Hi.", v2="Ho.")
    publishing(old, store).publish()
    new = folder(tmp_path / "p", v1="Changed.", v2="Ho.")
    with pytest.raises(PromptChanged) as caught:
        publishing(new, store).publish()
    told = str(caught.value)
    assert old.get("v1").sha256 in told and new.get("v1").sha256 in told
    assert "v1.yaml" in told and "2026-11-18" in told and "give the new text a new id" in told
    assert "v2" not in told and len(told.splitlines()) == 1
    assert list(start_errors(caught.value)) == [caught.value]


def test_a_refused_start_publishes_nothing_over_the_old_text(store: PublishedStore, tmp_path: Path) -> None:
    old = folder(tmp_path / "p", v1="Hi.")
    publishing(old, store).publish()
    with pytest.raises(PromptChanged):
        publishing(folder(tmp_path / "p", v1="Changed."), store).publish()
    publishing(folder(tmp_path / "p", v1="Hi."), store).publish()


def test_an_id_stays_published_when_its_file_goes_away(store: PublishedStore, tmp_path: Path) -> None:
    publishing(folder(tmp_path / "p", v1="Hi."), store).publish()
    publishing(folder(tmp_path / "p"), store).publish()
    with pytest.raises(PromptChanged):
        publishing(folder(tmp_path / "p", v1="Changed."), store).publish()


def test_checking_publishes_nothing(store: PublishedStore, tmp_path: Path) -> None:
    assert publishing(folder(tmp_path / "p", v1="Hi."), store).check() == 0
    changed = publishing(folder(tmp_path / "p", v1="Changed."), store)
    changed.publish()
    assert changed.check() == 1
    with pytest.raises(PromptChanged):
        publishing(folder(tmp_path / "p", v1="Hi."), store).check()


def test_a_gateway_starts_when_the_store_is_away_but_a_check_says_so(tmp_path: Path) -> None:
    versions = folder(tmp_path / "p", v1="Hi.")
    away: list[PublishedStore] = [
        MemoryPublished(broken=True),
        SqlitePublished(f"sqlite:///{tmp_path}/no/such/folder/state.db"),
    ]
    for store in away:
        asked = publishing(versions, store)
        asked.publish()
        assert asked.published_at("v1") is None
        with pytest.raises(StoreUnreachable):
            asked.check()


def test_of_processes_that_publish_at_once_all_see_the_same_first_text(tmp_path: Path) -> None:
    url, seen = f"sqlite:///{tmp_path}/state.db", []
    start = threading.Barrier(6)

    def one(number: int) -> None:
        store = SqlitePublished(url)
        start.wait()
        seen.append(store.publish({"v1": f"{number:064}"}, at=NOW)["v1"].sha256)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 6 and len(set(seen)) == 1


@given(
    steps=st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), max_size=3), max_size=6)
)
def test_whatever_is_published_in_whatever_order_the_first_text_of_an_id_stays(
    steps: list[dict[str, str]],
) -> None:
    store, first = MemoryPublished(), dict[str, str]()
    for hashes in steps:
        for version_id, sha256 in hashes.items():
            first.setdefault(version_id, sha256)
        assert {name: one.sha256 for name, one in store.publish(hashes, at=NOW).items()} == first
