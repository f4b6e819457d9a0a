"""The layer of LoRA adapters: their registry, files, loader and import."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adapters.base_model import BaseModel, base_model
from adapters.catalogue import AdapterState as VersionState
from adapters.registry import AdapterRegistry
from adapters.residency import AdapterDemand
from adapters.store import AdapterStore
from gateway.config.adapters_file import RegistryContent, read_registry_file
from gateway.config.settings import Settings
from gateway.lora.fetch import S3, AdapterSource
from gateway.lora.importer import AdapterImport
from gateway.lora.loader import LoraLoader
from gateway.lora.preload_orders import AdapterOrders
from gateway.lora.registry import STREAM, AdapterProjection
from gateway.weights.location import s3_prefix
from gateway.weights.s3 import S3Fetcher
from gateway.wiring.foundation import Foundation
from gateway.wiring.state import StateParts, make_state


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """LoRA adapters; requests lease from ``registry``, and ``orders`` connects to the other processes."""

    registry: AdapterRegistry
    projection: AdapterProjection
    source: AdapterSource
    loader: LoraLoader
    orders: AdapterOrders
    importer: AdapterImport
    own_state: StateParts | None = None

    def states(self) -> dict[str, int]:
        counts = Counter(self.registry.registered.states.values())
        return {state.value: counts[state] for state in VersionState}

    async def run(self, engine_ready: Callable[[], bool]) -> None:
        """Import the registry file, then load adapters by demand, until cancelled."""
        own = self.own_state
        if own is not None:
            await own.open()
        try:
            async with asyncio.TaskGroup() as tasks:
                if own is not None:
                    tasks.create_task(own.run(), name="adapters-state")
                tasks.create_task(self.importer.run(), name="adapters-import")
                tasks.create_task(self.orders.run(), name="adapters-orders")
                tasks.create_task(self.loader.run_workers(), name="adapters-workers")
                tasks.create_task(
                    self.loader.run(lambda: self.importer.tried and engine_ready()), name="adapters-loader"
                )
        finally:
            if own is not None:
                await own.close()


def make_adapters(base: Foundation) -> AdapterParts:
    """Build the layer; the loader's workers are attached later. Raises RegistryFileError."""
    settings = base.settings
    section, model_id = settings.adapters, settings.engine.model_id
    own = None  # the store of ``adapters.state_url``, through which a worker here shares only the registry
    if section.state_url is not None:
        config = settings.state.model_copy(update={"url": section.state_url})
        own = make_state(config, clock=base.clock, unix_time=base.unix_time)
    state = own or base.state
    content = read_registry_file(Path(section.file)) if section.file else RegistryContent((), {})
    folder = adapters_folder(settings, state)
    store, registry = AdapterStore(folder), AdapterRegistry()
    registry.expect([*(one.adapter_id for one in content.adapters), *content.aliases])
    projection = AdapterProjection(state.store, registry, model_id, folder_of=store.path)
    projection.follow(state.follow(STREAM, projection.take))
    source = AdapterSource(
        store,
        served_base(settings),
        fetcher=lambda prefix: S3Fetcher(prefix, settings.weights),
        cache=folder / "fetched",
        s3_prefixes=[
            s3_prefix(one)
            for one in (
                *section.s3_prefixes,
                base.weights[None].source,
                *(one.path for one in content.adapters),
            )
            if one.startswith(S3)
        ],
        timeout_s=section.fetch_timeout_seconds,
        catalogue=lambda: projection.catalogue,
    )
    loader = LoraLoader(
        registry,
        projection,
        demand=AdapterDemand(section.half_life_seconds),
        folder=folder,
        bring=source.bring,
        emit=base.events.emit,
        clock=base.clock,
        unix_time=base.unix_time,
        preload_timeout_s=section.preload_timeout_seconds,
    )
    return AdapterParts(
        registry,
        projection,
        source,
        loader,
        AdapterOrders(state.store, me=base.new_id("proc"), load=loader.preload_ordered),
        AdapterImport(content, projection, source, base_model=model_id),
        own_state=own,
    )


def adapters_folder(settings: Settings, state: StateParts) -> Path:
    """Return the adapters' folder: as configured, else next to the state file, else in the weights' cache.

    The path is absolute, because engines load from it and may have another working directory.
    """
    if settings.adapters.folder is not None:
        return Path(settings.adapters.folder).expanduser().absolute()
    if (file := state.url.path) is not None:
        return file.with_name(f"{file.name}.adapters").absolute()
    return Path(settings.weights.cache_folder).expanduser().absolute() / "adapters"


def served_base(settings: Settings) -> BaseModel:
    """Return the base model that adapters must fit; without its ``config.json``, shapes are not compared."""
    engine, path = settings.engine, Path(settings.engine.model) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return base_model(
        engine.model_id,
        config,
        max_lora_rank=engine.max_lora_rank,
        aliases=(Path(engine.model).resolve().name, *settings.adapters.base_names),
        embedded=engine.kind == "embedded",
    )
