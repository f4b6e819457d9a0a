"""The LoRA slots of an engine: adapters load on first use or ahead; idle ones in least demand are evicted."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import PurePath
from typing import Protocol, runtime_checkable

from adapters.errors import AdapterError
from adapters.events import AdapterAsked, AdapterEvent, AdapterLoaded, AdapterLoadFailed, AdapterUnloaded
from adapters.residency import AdapterDemand, Broken, Full, LoadDecision, Residency
from adapters.values import Adapter
from engine import errors
from resilience.failures import BackendFailure, FailureKind

RETRY_AFTER_S = 1.0  # Retry-After when all slots are in use: about the length of an answer
PARAM = "adapter_id"  # the field at fault in failures that the adapter causes, not the engine


class AdapterHolder(Protocol):
    """What the slots need of an engine.

    Invariant: a failed load changes nothing. A load whose caller is cancelled may continue; ``adapters`` has
    the adapter once it is done.
    """

    @property
    def adapters(self) -> Mapping[str, str]:
        """Folder of each loaded adapter, by id."""

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, or replace its weights. Raises EngineError."""

    async def unload_adapter(self, adapter_id: str) -> None:
        """Accept no new request for the adapter. Raises EngineError."""


@runtime_checkable
class Pinning(Protocol):
    """A holder whose engine evicts by itself and can exempt some adapters from it."""

    async def pin_adapters(self, names: Collection[str]) -> None:
        """Pin those of ``names`` that are loaded, and no others; may be called repeatedly."""


async def already_here(adapter: Adapter) -> None:
    """The adapter's files are already on this machine."""


@dataclass(eq=False)
class LoraSlots:
    """At most ``places`` adapters in one engine. Lives on the event loop; one load at a time.

    An adapter in use is never evicted. An adapter whose folder has changed is loaded again; running requests
    finish on the weights they started with.

    Args:
        places: most adapters loaded at once.
        demand: how much each adapter is requested; outlives the engine.
        bring: brings an adapter's files to this machine, if needed; raises AdapterError.
    """

    engine: AdapterHolder
    places: int
    _: KW_ONLY
    demand: AdapterDemand | None = None
    bring: Callable[[Adapter], Awaitable[None]] = already_here
    emit: Callable[[AdapterEvent], None] = lambda event: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.residency = Residency(self.places, self.demand)
        self._used = False
        self._changing = asyncio.Lock()

    @property
    def in_use(self) -> tuple[str, ...] | None:
        """The adapters that requests use now; ``None`` until one was used."""
        return self.residency.in_use if self._used else None

    @asynccontextmanager
    async def hold(self, adapter: Adapter) -> AsyncIterator[None]:
        """Load the adapter if needed, and keep it loaded while the block runs.

        Raises:
            BackendFailure: all places are in use (``throttled``) or loading failed (``model_not_found``).
            EngineDead: the engine is dead.
        """
        name, residency = adapter.adapter_id, self.residency
        residency.enter(name, self.clock())
        self._used = True
        try:
            ready = residency.is_ready(name, adapter.path)
            self.emit(AdapterAsked(name, ready))
            if not ready:
                await self._load(adapter)
            yield
        finally:
            residency.leave(name, self.clock())

    async def pin(self, names: Collection[str]) -> None:
        """Exempt these adapters, and no others, from eviction. Raises EngineError."""
        self.residency.pin(names)
        if isinstance(self.engine, Pinning):
            await self.engine.pin_adapters(names)

    async def preload(self, adapter: Adapter) -> None:
        """Load an adapter ahead of its first request. Raises as :meth:`hold` does."""
        await self._load(adapter, ahead=True)

    async def load_next(self, known: Sequence[Adapter]) -> bool:
        """Load the next adapter worth loading ahead of its first request; returns whether one was loaded.

        A failure is emitted as an event and not retried at once.
        """
        by_name = {adapter.adapter_id: adapter for adapter in known}
        name = self.residency.next_load(by_name, self.engine.adapters, self.clock())
        if name is None:
            return False
        try:
            await self._load(by_name[name], ahead=True)
        except BackendFailure:
            return False
        return True

    async def unload(self, adapter_id: str) -> None:
        """Unload an adapter unless it is in use. Raises EngineError."""
        async with self._changing:
            if adapter_id in self.engine.adapters and adapter_id not in self.residency.in_use:
                await self._give_up(adapter_id, "retired")

    async def _load(self, adapter: Adapter, *, ahead: bool = False) -> None:
        self._decide(adapter)  # refuses an adapter that has just failed, without waiting for other loads
        try:
            await self.bring(adapter)  # may take long, and delays no other request
        except AdapterError as error:
            why = "its files are not on this machine; the log says why"
            raise self._failed(adapter, "not_here", str(error), told=why) from error
        async with self._changing:  # a concurrent second caller finds it loaded
            decision = self._decide(adapter)
            if decision is None:
                return
            if isinstance(decision, Full):
                raise _full(
                    f"all {self.places} adapters that the engine can hold are in use or pinned "
                    f"({decision.pinned} pinned)"
                )
            await self._carry_out(adapter, decision, ahead=ahead)

    async def _carry_out(self, adapter: Adapter, decision: LoadDecision, *, ahead: bool) -> None:
        started_at = self.clock()
        try:
            if decision.evict is not None:
                await self._give_up(decision.evict, "room")
            await self.engine.load_adapter(adapter)
        except errors.NoAdapterRoom as error:
            # A load whose caller was cancelled may have taken the place meanwhile.
            again = self._decide(adapter)
            if decision.evict is not None or not isinstance(again, LoadDecision) or again.evict is None:
                raise _full(str(error)) from error
            return await self._carry_out(adapter, again, ahead=ahead)
        except errors.EngineAdapterError as error:
            raise self._failed(adapter, error.code, str(error)) from error
        now = self.clock()
        self.residency.loaded(adapter.adapter_id, adapter.path, now)
        self.emit(AdapterLoaded(adapter.adapter_id, now - started_at, ahead))

    async def _give_up(self, adapter_id: str, reason: str) -> None:
        self.residency.unloaded(adapter_id)
        with contextlib.suppress(errors.AdapterNotLoaded):  # unloaded for a caller that was cancelled
            await self.engine.unload_adapter(adapter_id)
        self.emit(AdapterUnloaded(adapter_id, reason))

    def _decide(self, adapter: Adapter) -> Full | LoadDecision | None:
        name = adapter.adapter_id
        decision = self.residency.decide(name, adapter.path, self.engine.adapters, self.clock())
        if isinstance(decision, Broken):
            raise _broken(name, decision)
        return decision

    def _failed(self, adapter: Adapter, code: str, detail: str, *, told: str | None = None) -> BackendFailure:
        # Callers read the message: do not disclose this machine's paths.
        detail = detail.replace(f"{adapter.path}/", "").replace(adapter.path, PurePath(adapter.path).name)
        wait_s = self.residency.failed(adapter.adapter_id, told or detail, self.clock())
        self.emit(AdapterLoadFailed(adapter.adapter_id, code, detail, wait_s))
        return _broken(adapter.adapter_id, Broken(told or detail, wait_s))


def _full(message: str) -> BackendFailure:
    # Isolated: the base model and the loaded adapters still work.
    return BackendFailure(
        FailureKind.THROTTLED, message, retry_after_s=RETRY_AFTER_S, param=PARAM, isolated=True
    )


def _broken(name: str, why: Broken) -> BackendFailure:
    return BackendFailure(
        FailureKind.MODEL_NOT_FOUND,
        f"adapter {name} cannot be loaded: {why.reason}",
        retry_after_s=why.retry_after_s,
        param=PARAM,
    )


MakeSlots = Callable[[AdapterHolder, int], LoraSlots]
