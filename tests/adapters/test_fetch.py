"""Registered adapters are brought to this machine by one task at a time."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import pytest

from adapters.base_model import BaseModel
from adapters.catalogue import Catalogue, Version
from adapters.errors import AdapterNotHere, AdapterRejected
from adapters.store import AdapterStore
from adapters.values import Adapter
from adapters.verify import Verified
from gateway.lora.fetch import AdapterSource
from tests.adapters import crafted
from tests.adapters.registry_gateway import no_fetcher, until


class FailingStore(AdapterStore):
    """Takes no adapter; counts how many are being taken at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.now = self.most = self.taken = 0
        self.may_end = threading.Semaphore(0)

    def take(self, source: Path, base: BaseModel, *, sha256: str | None = None) -> Verified:
        self.now, self.taken = self.now + 1, self.taken + 1
        self.most = max(self.most, self.now)
        self.may_end.acquire()
        self.now -= 1
        raise OSError(errno.ENOSPC, "disk full")


def a_source(store: AdapterStore, catalogue: Catalogue) -> AdapterSource:
    return AdapterSource(
        store,
        crafted.base(),
        fetcher=no_fetcher,
        cache=store.folder,
        s3_prefixes=(),
        timeout_s=30.0,
        catalogue=lambda: catalogue,
    )


async def test_an_adapter_that_cannot_be_brought_is_still_brought_by_one_task_at_a_time(
    tmp_path: Path,
) -> None:
    store = FailingStore(tmp_path)
    version = Version("a", 1, "tiny", 8, 16.0, (), 1, "0" * 64, str(tmp_path / "a"), "ops", 0.0)
    source = a_source(store, Catalogue(versions={"a": version}))
    adapter = Adapter("a", 1, "tiny", str(tmp_path / "a"))

    async def bring() -> None:
        with pytest.raises(AdapterNotHere, match="disk full"):
            await source.bring(adapter)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(bring())
        await until(lambda: store.taken == 1)
        store.may_end.release()
        await until(lambda: store.taken == 2)  # the one that waited
        tasks.create_task(bring())
        await asyncio.sleep(0.1)
        most = store.most
        store.may_end.release(2)
    assert (most, store.taken) == (1, 3)


@pytest.mark.parametrize("name", ["x" * 256, "x" * 256 + ".tar.gz"])
async def test_a_location_that_no_machine_can_have_is_refused_and_not_tried_again(
    tmp_path: Path, name: str
) -> None:
    source = a_source(AdapterStore(tmp_path / "store"), Catalogue())
    for check in (source.check, source.take):
        with pytest.raises(AdapterRejected, match="not_found: "):
            await check(str(tmp_path / name))
