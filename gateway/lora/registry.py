"""This process' adapter registry, computed from the stream ``adapters``, and changes to it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from adapters.catalogue import Catalogue, Version, apply
from adapters.registry import AdapterRegistry
from adapters.selection import AdapterOffer
from adapters.values import Adapter
from gateway.errors import BackendUnavailable
from gateway.state.errors import Conflict, StateUnavailable
from gateway.state.port import Record, StateStore
from gateway.state.projection import FollowedStream

STREAM = "adapters"
MAX_TRIES = 20  # most attempts to append a change; one fails if another process was first
IN_FORCE_S = 10.0  # longest wait until a change is applied in the process that made it


@dataclass(eq=False)
class AdapterProjection(FollowedStream):
    """Applies the stream's records, and appends new ones. Must be used on the event loop.

    Only versions for the served ``base_model`` are offered. ``folder_of`` maps a SHA-256 to a folder.
    """

    store: StateStore
    registry: AdapterRegistry
    base_model: str
    folder_of: Callable[[str], Path]

    def __post_init__(self) -> None:
        self._changed: Callable[[], None] = lambda: None
        self._refused: dict[str, str] = {}
        self._stale = False
        self._made: dict[str, tuple[Version, Adapter]] = {}
        self.catalogue = Catalogue()

    def on_change(self, listener: Callable[[], None]) -> None:
        self._changed = listener

    def take(self, record: Record) -> None:
        """Apply a record. Raises CatalogueError, and then nothing has changed."""
        self.catalogue = apply(
            self.catalogue, record.data, number=record.number, author=record.author, at=record.at
        )
        if not self._stale:
            # Once for all records that arrive together: at a start there may be thousands.
            self._stale = True
            asyncio.get_running_loop().call_soon(self._offer)

    def refuse(self, adapter_id: str, reason: str | None) -> None:
        """Refuse requests for an adapter of the file that cannot be registered, with this reason; ``None``:
        no longer."""
        if reason is not None:
            self._refused[adapter_id] = reason
        elif self._refused.pop(adapter_id, None) is None:
            return
        self._offer()

    def adapter(self, adapter_id: str) -> Adapter:
        """A version as engines take it. Raises CatalogueError when it is not registered."""
        return self._adapter(self.catalogue.version(adapter_id))

    async def change(self, decide: Callable[[Catalogue], bytes | None], *, author: str) -> bool:
        """Append the change that ``decide`` returns for the registry; ``False`` if it returns none.

        ``decide`` is called again if another process was first; it may raise AdapterError. Raises
        BackendUnavailable: the state store cannot be reached, or too many other changes came first.
        """
        try:
            for _ in range(MAX_TRIES):
                catalogue = self.catalogue
                event = decide(catalogue)
                if event is None:
                    return False
                try:
                    record = await self.followed.append(event, author=author, expected=catalogue.number)
                except Conflict:
                    if not await self.caught_up_to(catalogue.number + 1, IN_FORCE_S):
                        break
                    continue
                await self.caught_up_to(record.number, IN_FORCE_S)
                self._offer()
                return True
        except StateUnavailable as error:
            raise BackendUnavailable(
                f"{error}; {error.doubt('the adapters')}", retry_after_ms=1_000
            ) from error
        raise BackendUnavailable(
            "others change the registry at this moment; nothing was changed", retry_after_ms=1_000
        )

    def _offer(self) -> None:
        self._stale = False
        here = [one for one in self.catalogue.versions.values() if one.base_model == self.base_model]
        self.registry.offer(
            AdapterOffer(
                adapters=MappingProxyType({one.adapter_id: self._adapter(one) for one in here}),
                states=MappingProxyType({one.adapter_id: one.state for one in here}),
                aliases=self.catalogue.aliases,
                refused=MappingProxyType(dict(self._refused)),
            )
        )
        self._changed()

    def _adapter(self, version: Version) -> Adapter:
        made = self._made.get(version.adapter_id)
        if made is None or made[0] is not version:
            folder = str(self.folder_of(version.sha256))
            adapter = Adapter(
                version.adapter_id, version.engine_id, version.base_model, folder, version.labels
            )
            made = self._made[version.adapter_id] = version, adapter
        return made[1]
