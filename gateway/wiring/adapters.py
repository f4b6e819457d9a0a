"""The part of the composition root that makes the adapters' registry, its store and its desk."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapters.base_model import BaseModel, base_model
from adapters.catalogue import AdapterState as VersionState
from adapters.demand import AdapterDemand
from adapters.events import AdapterEvent
from adapters.registry import AdapterRegistry
from adapters.registry_file import RegistryContent, read_registry_file
from adapters.store import AdapterStore
from adapters.values import Adapter
from gateway.admin.adapters import AdapterAdmin
from gateway.config.settings import Settings
from gateway.lora.fetch import AdapterSource
from gateway.lora.importer import AdapterImport
from gateway.lora.loader import LoadsElsewhere, LoraLoader
from gateway.lora.preload_orders import AdapterOrders
from gateway.lora.registry import STREAM, AdapterProjection
from gateway.state.audit import Audit
from gateway.weights.source import make_s3_fetcher
from gateway.wiring.state import StateParts
from observability.adapter_metrics import AdapterFigures


@dataclass(frozen=True, slots=True)
class Adapters:
    """The registry and all that stands around it.

    Args:
        registry: what requests lease from.
        rooms: what the engine holds.
        orders: to load something, from and to the other processes.
        importer: takes in ``adapters.file``.
        desk: for operators.
        bring: makes sure that an adapter's files are on this machine.
    """

    registry: AdapterRegistry
    rooms: LoraLoader
    orders: AdapterOrders
    importer: AdapterImport
    desk: AdapterAdmin
    bring: Callable[[Adapter], Awaitable[None]]

    @property
    def ready(self) -> bool:
        """Whether the file was looked at and what was worth preloading is loaded, or was waited for."""
        return self.rooms.warm

    def figures(self) -> AdapterFigures:
        """For the metrics."""
        counts = Counter(state.value for state in self.registry.offered.states.values())
        states = {state.value: counts[state.value] for state in VersionState}
        return AdapterFigures(states, len(self.rooms.resident), self.rooms.places)

    async def run(self, engine_ready: Callable[[], bool]) -> None:
        """Import the file, then keep the engine's adapters, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.importer.run(), name="adapters-import")
            tasks.create_task(self.orders.run(), name="adapters-orders")
            tasks.create_task(self.rooms.run_workers(), name="adapters-workers")
            tasks.create_task(
                self.rooms.run(lambda: self.importer.tried and engine_ready()), name="adapters-rooms"
            )


def make_adapters(
    settings: Settings,
    state: StateParts,
    *,
    audit: Audit,
    emit: Callable[[AdapterEvent], None],
    clock: Callable[[], float],
    unix_time: Callable[[], float],
    routed: Callable[[str], Sequence[str]],
    workers: Callable[[], Sequence[LoadsElsewhere]],
    new_id: Callable[[str], str],
) -> Adapters:
    """Build what ``adapters`` of the configuration says.

    ``routed``: where the routing names an adapter; ``workers``: those in service that adapters are loaded on.

    Raises:
        RegistryFileError: the file cannot be used.
    """
    section, base_id = settings.adapters, settings.engine.model_id
    content = read_registry_file(Path(section.file)) if section.file else RegistryContent((), {})
    folder = adapters_folder(settings, state)
    store, registry = AdapterStore(folder), AdapterRegistry()
    registry.expect([*(one.adapter_id for one in content.adapters), *content.aliases])

    def changed() -> None:
        rooms.wake()

    book = AdapterProjection(
        state.store, registry, base_models=(base_id,), folder_of=store.path, changed=changed
    )
    book.follow(state.follow(STREAM, book.take))
    source = AdapterSource(
        store,
        served_base(settings),
        fetcher=lambda: make_s3_fetcher(settings.weights),
        cache=folder / "fetched",
        timeout_s=section.fetch_timeout_seconds,
        catalogue=lambda: book.catalogue,
    )
    rooms = LoraLoader(
        registry,
        book,
        heat=AdapterDemand(section.half_life_seconds),
        folder=folder,
        bring=source.bring,
        emit=emit,
        clock=clock,
        unix_time=unix_time,
        preload_timeout_s=section.preload_timeout_seconds,
        workers=workers,
    )
    orders = AdapterOrders(state.store, me=new_id("proc"), load=rooms.preload_ordered)
    desk = AdapterAdmin(book, registry, rooms, orders, source, audit, base_id, routed)
    importer = AdapterImport(content, book, source, base_model=base_id)
    return Adapters(registry, rooms, orders, importer, desk, source.bring)


def adapters_folder(settings: Settings, state: StateParts) -> Path:
    """Where adapters are kept: as configured, else beside the state store's file, else in the user's cache.

    Absolute: engines load from it whatever their working directory.
    """
    if settings.adapters.folder is not None:
        return Path(settings.adapters.folder).expanduser().absolute()
    if state.path is not None:
        return state.path.with_name(f"{state.path.name}.adapters").absolute()
    return Path(settings.weights.cache_folder).expanduser().absolute() / "adapters"


def served_base(settings: Settings) -> BaseModel:
    """The base model that adapters must fit; without its ``config.json`` their shapes are not compared."""
    engine, path = settings.engine, Path(settings.engine.model) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return base_model(
        engine.model_id,
        config,
        max_lora_rank=engine.max_lora_rank,
        aliases=(Path(engine.model).resolve().name, *settings.adapters.base_names),
        embedded=engine.kind == "embedded",
    )
