"""The adapters that the embedded engine holds: loaded on first use; the longest idle one makes room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from adapters.values import Adapter
from resilience.failures import BackendFailure, FailureKind

# How soon a place may be free: about the length of an answer.
RETRY_AFTER_S = 1.0


class AdapterHolder(Protocol):
    """What the shelf needs of an engine; ``EngineClient`` is one."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """What is loaded: id and folder."""

    async def load_adapter(self, adapter_id: str, path: str) -> None:
        """Load or replace."""

    async def unload_adapter(self, adapter_id: str) -> None:
        """Take no new request for it."""


class AdapterShelf:
    """At most ``places`` adapters in one engine. Lives on the event loop; one load at a time.

    An adapter in use is never taken away. A name whose folder has changed is loaded anew; the engine lets
    requests that run finish on the weights they began with.
    """

    def __init__(self, engine: AdapterHolder, places: int) -> None:
        self.places = places
        self._engine = engine
        self._ready: dict[str, str] = {}  # id and folder of what requests may use now
        self._users: dict[str, int] = {}  # requests by id, last used last; 0 is idle
        self._changing = asyncio.Lock()

    @property
    def in_use(self) -> tuple[str, ...] | None:
        """The adapters that requests use now; ``None`` until one was used."""
        names = tuple(name for name, users in self._users.items() if users)
        return names if self._ready or names else None

    @asynccontextmanager
    async def hold(self, adapter: Adapter) -> AsyncIterator[None]:
        """The adapter is loaded while the block runs.

        Raises:
            BackendFailure: all places are in use.
            engine.errors.EngineError: it cannot be loaded; the others are as before.
        """
        name = adapter.adapter_id
        self._users[name] = self._users.pop(name, 0) + 1
        try:
            if self._ready.get(name) != adapter.path:
                async with self._changing:  # who comes second finds it loaded
                    if self._ready.get(name) != adapter.path:
                        await self._load(adapter)
            yield
        finally:
            self._users[name] -= 1
            if not self._users[name] and name not in self._ready:
                del self._users[name]

    async def _load(self, adapter: Adapter) -> None:
        held = self._engine.adapters
        if adapter.adapter_id not in held and len(held) >= self.places:
            await self._make_room(held)
        await self._engine.load_adapter(adapter.adapter_id, adapter.path)
        self._ready[adapter.adapter_id] = adapter.path

    async def _make_room(self, held: Mapping[str, str]) -> None:
        # First what a cancelled load has left behind, then what has been idle longest.
        idle = [name for name in held if name not in self._users]
        idle += [name for name, users in self._users.items() if name in held and not users]
        if not idle:
            raise BackendFailure(
                FailureKind.THROTTLED,
                f"all {self.places} adapters that the engine can hold are in use",
                retry_after_s=RETRY_AFTER_S,
            )
        self._ready.pop(idle[0], None)
        self._users.pop(idle[0], None)
        await self._engine.unload_adapter(idle[0])
