"""Loads pinned and frequently requested adapters into the engine in advance, and unloads retired ones."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from adapters.catalogue import AdapterState
from adapters.events import AdapterEvent
from adapters.registry import AdapterRegistry
from adapters.residency import AdapterDemand
from adapters.values import Adapter
from engine.errors import EngineError
from gateway.backends.lora_slots import AdapterHolder, LoraSlots
from gateway.backends.workers.loras import WorkerLoras
from gateway.lora.registry import IN_FORCE_S, AdapterProjection
from gateway.weights.records import read_json, write_json
from resilience.failures import BackendFailure, FailureKind

TICK_S = 0.5  # interval of checks of the engine's adapters, besides those at each change of the registry
# Interval of checks of the workers' adapters: a pin, or a worker that returns, may wait this long.
WORKERS_TICK_S = 2.0
# Interval at which the demand is stored; a kill loses at most this much of it.
SAVE_S = 30.0
DEMAND_FILE = "demand.json"


@dataclass(eq=False)
class LoraLoader:
    """Loads adapters into the slots of the running engine, and on the workers.

    Args:
        demand: the demand for each adapter; stored in ``folder``, so that a restart keeps it.
        preload_timeout_s: longest time for which readiness waits for preloading.
    """

    registry: AdapterRegistry
    projection: AdapterProjection
    demand: AdapterDemand
    folder: Path
    bring: Callable[[Adapter], Awaitable[None]]
    emit: Callable[[AdapterEvent], None]
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    preload_timeout_s: float

    def __post_init__(self) -> None:
        self._file = self.folder / DEMAND_FILE
        self._workers: Callable[[], Sequence[WorkerLoras]] = tuple
        self._log = structlog.get_logger("adapters")
        self._slots: LoraSlots | None = None
        self._changed = asyncio.Event()
        self.warm = False  # whether preloading at the start is done, successfully or not
        self.projection.on_change(self.wake)

    def attach_workers(self, workers: Callable[[], Sequence[WorkerLoras]]) -> None:
        """Load adapters also on ``workers``: those in service on which this gateway loads adapters."""
        self._workers = workers

    @property
    def resident(self) -> tuple[str, ...]:
        return self._slots.residency.resident if self._slots is not None else ()

    @property
    def places(self) -> int:
        """Most adapters that the engine in process holds; 0 without such an engine."""
        return self._slots.places if self._slots is not None else 0

    @property
    def least_places(self) -> int:
        """The smallest ``places`` of the engine and the workers that hold adapters; 0 if none does."""
        return min(filter(None, [self.places, *(one.places for one in self._workers())]), default=0)

    def demand_of(self, adapter_id: str) -> float:
        return self.demand.of(adapter_id, self.clock())

    def make_slots(self, engine: AdapterHolder, places: int) -> LoraSlots:
        """Make the slots of a new engine; they replace those of an earlier engine."""
        self._slots = LoraSlots(
            engine, places, demand=self.demand, bring=self.bring, emit=self.emit, clock=self.clock
        )
        self.wake()
        return self._slots

    def wake(self) -> None:
        """Check at once: the registry has changed."""
        self._changed.set()

    async def preload(self, adapter: Adapter) -> None:
        """Load an adapter now, in the engine in process and on all workers. Raises BackendFailure if one of
        them cannot load it, or if there is none."""
        places: list[LoraSlots | WorkerLoras] = [*self._workers()]
        if self._slots is not None and self._slots.places:
            self._slots.residency.retry(adapter.adapter_id)
            places.append(self._slots)
        if not places:
            raise BackendFailure(
                FailureKind.BACKEND_UNAVAILABLE,
                "this gateway has neither an engine in process nor a worker in service that it loads "
                "adapters on",
            )

        failures: list[BackendFailure] = []

        async def load(where: LoraSlots | WorkerLoras) -> None:
            try:
                await where.preload(adapter)
            except BackendFailure as failure:
                failures.append(failure)
            except EngineError as error:
                failures.append(BackendFailure(FailureKind.BACKEND_UNAVAILABLE, str(error)))

        async with asyncio.TaskGroup() as loads:
            for one in places:
                loads.create_task(load(one), name=f"preload-{adapter.adapter_id}")
        if failures:
            raise failures[0]

    async def preload_ordered(self, adapter_id: str, number: int) -> None:
        """Preload by order of another process, whose registry is at ``number``. Raises AdapterError,
        BackendFailure."""
        await self.projection.caught_up_to(number, IN_FORCE_S)
        if self.projection.catalogue.version(adapter_id).state is not AdapterState.RETIRED:
            await self.preload(self.projection.adapter(adapter_id))

    async def run_workers(self) -> None:
        """Keep pinned adapters loaded on the workers, and retired ones unloaded, until cancelled."""

        async def keep(one: WorkerLoras, pinned: Collection[str], retired: Collection[str]) -> None:
            try:
                await one.keep(self.registry.known, pinned, retired)
            except BackendFailure as failure:
                self._log.info("a worker's adapters not updated", reason=str(failure))

        while True:
            pinned, versions = self._pinned(), self.projection.catalogue.versions
            retired = [name for name, one in versions.items() if one.state is AdapterState.RETIRED]
            async with asyncio.TaskGroup() as looks:
                for one in self._workers():
                    looks.create_task(keep(one, pinned, retired), name="worker-adapters")
            await asyncio.sleep(WORKERS_TICK_S)

    async def run(self, ready: Callable[[], bool]) -> None:
        """Load and unload by the registry and the demand, until cancelled.

        ``ready``: whether the engine in process accepts work; true without one.
        """
        await self._restore()
        saved_at = self.clock()
        try:
            while True:
                if ready():
                    await self._update()
                if self.clock() - saved_at >= SAVE_S:
                    saved_at = self.clock()
                    await asyncio.to_thread(self._write, self.demand.snapshot(self.clock()))
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._changed.wait()
        finally:
            self._write(self.demand.snapshot(self.clock()))

    async def _update(self) -> None:
        slots = self._slots
        try:
            if slots is not None and slots.places:
                await slots.pin(self._pinned())
                if not self.warm:
                    await self._preload(slots)
                await self._unload_retired(slots)
                while await slots.load_next(self.registry.known):
                    await slots.pin(self._pinned())
        except EngineError as error:
            # The engine has ended; the next one gets its own slots.
            self._log.warning("adapters not updated", reason=error.code)
        self.warm = True

    def _pinned(self) -> list[str]:
        return [one.adapter_id for one in self.projection.catalogue.versions.values() if one.pinned]

    async def _preload(self, slots: LoraSlots) -> None:
        begun = self.clock()
        known = {adapter.adapter_id: adapter for adapter in self.registry.known}
        wanted = slots.residency.wanted(known, begun)
        if not wanted:
            return
        try:
            async with asyncio.timeout(self.preload_timeout_s):
                for name in wanted:
                    try:
                        await slots.preload(known[name])
                    except BackendFailure as failure:
                        self._log.warning("adapter not preloaded", adapter=name, reason=str(failure))
        except TimeoutError:
            self._log.warning(
                "ready before all adapters are preloaded",
                after_s=self.preload_timeout_s,
                missing=[name for name in wanted if name not in slots.residency.resident],
            )
        self._log.info(
            "adapters preloaded",
            count=len(slots.residency.resident),
            seconds=round(self.clock() - begun, 2),
        )

    async def _unload_retired(self, slots: LoraSlots) -> None:
        versions, leased = self.projection.catalogue.versions, self.registry.leased()
        for name in slots.residency.resident:
            version = versions.get(name)
            if version is not None and version.state is AdapterState.RETIRED and name not in leased:
                await slots.unload(name)

    async def _restore(self) -> None:
        """Restore the stored demand, unless there is no usable file."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            data = await asyncio.to_thread(read_json, self._file)
            demand = {str(name): float(value) for name, value in data["demand"].items()}
            self.demand.restore(demand, self.clock(), age_s=self.unix_time() - float(data["at"]))

    def _write(self, demand: object) -> None:
        try:
            write_json(self._file, {"at": self.unix_time(), "demand": demand})
        except OSError as error:
            self._log.warning(
                "adapters' demand not stored", file=str(self._file), reason=type(error).__name__
            )
