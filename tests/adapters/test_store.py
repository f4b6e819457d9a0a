"""The store: a valid adapter is stored whole under its digest; a rejected one leaves nothing."""

from __future__ import annotations

import errno
import os
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters.errors import AdapterRejected, Rejection
from adapters.store import AdapterStore
from tests.adapters import crafted


def test_an_adapter_is_kept_under_its_content_and_cannot_be_changed_by_its_source(tmp_path: Path) -> None:
    store, source = AdapterStore(tmp_path / "store"), crafted.write(tmp_path / "a")
    (source / "README.md").write_text("not loaded, so not kept")
    verified = store.take(source, crafted.base())
    path = store.path(verified.sha256)
    (source / "adapter_model.safetensors").write_bytes(b"other")
    assert store.has(verified.sha256)
    assert sorted(one.name for one in path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert store.check(path, crafted.base(), sha256=verified.sha256) == verified
    assert not os.access(path / "adapter_model.safetensors", os.W_OK) or os.geteuid() == 0


def _truncate(file: Path) -> None:
    file.chmod(0o600)
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("damage", [Path.unlink, _truncate], ids=["deleted", "truncated"])
def test_an_adapter_of_which_a_file_is_not_whole_is_stored_again(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    store, source = AdapterStore(tmp_path / "store"), crafted.write(tmp_path / "a")
    verified = store.take(source, crafted.base())
    damage(store.path(verified.sha256) / name)
    assert not store.has(verified.sha256)
    store.take(source, crafted.base())
    assert store.check(store.path(verified.sha256), crafted.base(), sha256=verified.sha256) == verified


def test_the_same_content_from_a_folder_and_from_an_archive_is_kept_once(tmp_path: Path) -> None:
    store, source = AdapterStore(tmp_path / "store"), crafted.write(tmp_path / "a")
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(source, "a")
    first, second = store.take(source, crafted.base()), store.take(archive, crafted.base())
    assert first.sha256 == second.sha256
    assert [one.name for one in store.folder.iterdir() if one.name != ".parts"] == [first.sha256]


def test_a_disk_that_cannot_hold_an_archive_s_files_is_not_the_archive_s_fault(tmp_path: Path) -> None:
    store, archive = AdapterStore(tmp_path / "store"), tmp_path / "a.tar"
    with tarfile.open(archive, "w") as packed:
        packed.add(crafted.write(tmp_path / "a"), "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError) as failed:
            store.take(archive, crafted.base())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failed.value.errno == errno.EFBIG


def test_what_does_not_pass_leaves_nothing_behind(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store")
    source = crafted.write(tmp_path / "a", config=crafted.adapter_config(base_model_name_or_path="other"))
    with pytest.raises(AdapterRejected) as caught:
        store.take(source, crafted.base())
    assert caught.value.code is Rejection.WRONG_BASE
    assert [*(store.folder / ".parts").iterdir()] == []
    assert [one.name for one in store.folder.iterdir()] == [".parts"]


def test_what_a_killed_process_has_left_is_removed_a_day_later(tmp_path: Path) -> None:
    store, source = AdapterStore(tmp_path / "store"), crafted.write(tmp_path / "a")
    old, new = store.folder / ".parts" / "old", store.folder / ".parts" / "new"
    for scratch in (old, new):
        (scratch / "adapter").mkdir(parents=True)
        (scratch / "adapter" / "adapter_model.safetensors").write_bytes(b"half")
    began = new.stat().st_mtime - 90_000.0
    os.utime(old, (began, began))
    store.take(source, crafted.base())
    assert [*(store.folder / ".parts").iterdir()] == [new]


def test_a_pickle_beside_the_weights_is_refused_though_it_would_not_be_kept(tmp_path: Path) -> None:
    source = crafted.write(tmp_path / "a")
    (source / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(AdapterRejected) as caught:
        AdapterStore(tmp_path / "store").take(source, crafted.base())
    assert caught.value.code is Rejection.NOT_SAFETENSORS


@pytest.mark.parametrize("name", ["nowhere", "nowhere.tar.gz"])
def test_a_place_that_is_not_there_is_said_to_be_missing(tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterRejected) as caught:
        AdapterStore(tmp_path / "store").take(tmp_path / name, crafted.base())
    assert caught.value.code is Rejection.NOT_FOUND


def test_content_other_than_promised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejected) as caught:
        AdapterStore(tmp_path / "store").take(crafted.write(tmp_path / "a"), crafted.base(), sha256="0" * 64)
    assert caught.value.code is Rejection.WRONG_CHECKSUM
