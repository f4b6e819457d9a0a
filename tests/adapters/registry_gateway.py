"""One gateway's part of the registry, on a shared state store, with a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapters.events import AdapterEvent
from adapters.registry import AdapterRegistry
from adapters.residency import AdapterDemand
from adapters.store import AdapterStore
from adapters.values import Adapter
from engine.errors import AdapterNotFound
from gateway.admin.adapters import AdapterAdmin
from gateway.config.adapters_file import RegistryContent
from gateway.lora.fetch import AdapterSource
from gateway.lora.importer import AdapterImport
from gateway.lora.loader import LoraLoader
from gateway.lora.preload_orders import AdapterOrders
from gateway.lora.registry import STREAM, AdapterProjection
from gateway.state.audit import Audit
from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.state.stream_follower import StreamFollower
from gateway.weights.location import S3Prefix, s3_prefix
from gateway.weights.values import Fetcher
from tests.adapters import crafted


@dataclass
class FakeEngine:
    """Stores adapters; ``broken`` ones cannot be loaded, and none until ``may_load`` is set."""

    adapters: dict[str, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    may_load: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_load.set()

    async def load_adapter(self, adapter: Adapter) -> None:
        self.log.append(f"load {adapter.adapter_id}")
        await self.may_load.wait()
        if adapter.adapter_id in self.broken or not (Path(adapter.path) / "adapter_config.json").is_file():
            raise AdapterNotFound(f"{adapter.path} is not there")
        self.adapters[adapter.adapter_id] = adapter.path

    async def unload_adapter(self, adapter_id: str) -> None:
        self.log.append(f"unload {adapter_id}")
        del self.adapters[adapter_id]


def no_fetcher(prefix: S3Prefix) -> Fetcher:
    raise AssertionError("nothing is fetched here")


@dataclass
class RegistryGateway:
    """A gateway's adapter registry with its projection, source, loader, admin service, store and events."""

    registry: AdapterRegistry
    projection: AdapterProjection
    source: AdapterSource
    loader: LoraLoader
    admin: AdapterAdmin
    store: AdapterStore
    events: list[AdapterEvent]

    def importing(self, content: RegistryContent) -> AdapterImport:
        return AdapterImport(content, self.projection, self.source, base_model="tiny")


@asynccontextmanager
async def gateway(
    streams: MemoryStreams,
    folder: Path,
    *,
    clock: Callable[[], float] = lambda: 0.0,
    unix_time: Callable[[], float] = lambda: 1_800_000_000.0,
    fetcher: Callable[[S3Prefix], Fetcher] = no_fetcher,
    s3_prefixes: Sequence[str] = ("s3://bucket", "s3://adapters/team"),
    routed: Callable[[str], Sequence[str]] = lambda adapter_id: (),
    workers: Sequence[Any] = (),
) -> AsyncIterator[RegistryGateway]:
    """A gateway's registry, which follows the streams while the block runs."""
    state = MemoryStateStore(streams, unix_time=unix_time, poll_s=0.05)
    registry, store, events = AdapterRegistry(), AdapterStore(folder), list[AdapterEvent]()
    projection = AdapterProjection(state, registry, base_model="tiny", folder_of=store.path)
    follower = StreamFollower(
        state, STREAM, projection.take, copy=None, clock=asyncio.get_running_loop().time
    )
    projection.follow(follower)
    source = AdapterSource(
        store,
        crafted.base(),
        fetcher=fetcher,
        cache=folder / "fetched",
        s3_prefixes=[*map(s3_prefix, s3_prefixes)],
        timeout_s=30.0,
        catalogue=lambda: projection.catalogue,
    )
    loader = LoraLoader(
        registry,
        projection,
        demand=AdapterDemand(60.0),
        folder=folder,
        bring=source.bring,
        emit=events.append,
        clock=clock,
        unix_time=unix_time,
        preload_timeout_s=30.0,
    )
    loader.attach_workers(lambda: workers)
    orders = AdapterOrders(state, me=str(folder), load=loader.preload_ordered)
    audit = Audit(state, unix_time=unix_time)
    admin = AdapterAdmin(projection, registry, loader, orders, source, audit, "tiny", routed, b"shared")
    await state.open()
    await follower.start()
    async with asyncio.TaskGroup() as loops:
        running = [loops.create_task(one) for one in (state.run(), follower.run(), orders.run())]
        try:
            yield RegistryGateway(registry, projection, source, loader, admin, store, events)
        finally:
            for task in running:
                task.cancel()
            await state.close()


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.005)
