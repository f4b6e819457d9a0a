"""Registers the adapters of ``adapters.file``; adapters that are already registered are not changed."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from adapters import changes
from adapters.catalogue import AdapterState, Catalogue, CatalogueError
from adapters.errors import AdapterError, AdapterNotHere, Rejection
from adapters.values import Adapter
from gateway.config.adapters_file import RegistryContent
from gateway.errors import BackendUnavailable
from gateway.lora.fetch import AdapterSource
from gateway.lora.registry import AdapterProjection

AUTHOR = "adapters.file"
AGAIN_S = 5.0  # pause between attempts while the state store or an adapter's location is unreachable


@dataclass(eq=False)
class AdapterImport:
    """Registers the adapters that the file lists, makes them active, and creates the file's new aliases.

    The file does not undo operators' changes: an existing alias stays, a retired version stays retired.
    Changed content of a registered id is refused, and adapters of other base models are left out.
    """

    content: RegistryContent
    projection: AdapterProjection
    source: AdapterSource
    base_model: str
    again_s: float = AGAIN_S

    def __post_init__(self) -> None:
        self._log = structlog.get_logger("adapters")
        # Whether the import of the whole file was tried once, even if something was unreachable.
        self.tried = False

    async def run(self) -> None:
        """Import the file; returns when each of its entries is registered or refused."""
        pending: Sequence[Adapter] = [one for one in self.content.adapters if self._fits(one)]
        aliases = self.content.aliases
        while True:
            pending = [adapter for adapter in pending if not await self._registered(adapter)]
            aliases = await self._aliased(aliases, {one.adapter_id for one in pending})
            self.tried = True
            if not pending and not aliases:
                return
            await asyncio.sleep(self.again_s)

    def _fits(self, adapter: Adapter) -> bool:
        if adapter.base_model == self.base_model:
            return True
        self._log.warning(
            "adapter of adapters.file left out: it is of another base model",
            adapter=adapter.adapter_id,
            base_model=adapter.base_model,
            served=self.base_model,
        )
        self.projection.refuse(
            adapter.adapter_id,
            f"{Rejection.WRONG_BASE.value}: for {adapter.base_model!r}; served here: {self.base_model!r}",
        )
        return False

    async def _registered(self, adapter: Adapter) -> bool:
        """Register an adapter; ``False`` if the state store or its location cannot be reached."""
        name = adapter.adapter_id
        try:
            await self._register(adapter)
        except (BackendUnavailable, AdapterNotHere) as error:
            if not self.tried:
                self._log.warning("adapter not imported yet", adapter=name, reason=str(error))
            if isinstance(error, AdapterNotHere):
                self.projection.refuse(name, str(error))
            return False
        except AdapterError as error:
            self._log.error("adapter of adapters.file refused", adapter=name, reason=str(error))
            self.projection.refuse(name, str(error))
        else:
            self.projection.refuse(name, None)
        return True

    async def _register(self, adapter: Adapter) -> None:
        name, held = adapter.adapter_id, self.projection.catalogue.versions.get(adapter.adapter_id)
        if held is not None:
            found = await self.source.fingerprint(adapter.path)
            if found is not None and found != held.sha256:
                raise CatalogueError(
                    f"id: {name!r} is registered with other content; versions never change, so give the new "
                    "content a new id"
                )
        else:
            register = partial(
                changes.register,
                adapter_id=name,
                verified=await self.source.take(adapter.path),
                base_model=adapter.base_model,
                location=adapter.path,
                labels=adapter.labels,
            )
            await self.projection.change(register, author=AUTHOR)
        if self.projection.catalogue.version(name).state is AdapterState.STAGED:
            await self.projection.change(
                lambda catalogue: changes.promote(catalogue, name, alias=None, force=True), author=AUTHOR
            )

    async def _aliased(self, aliases: Mapping[str, str], pending: Collection[str]) -> Mapping[str, str]:
        """Create missing aliases; those that are left to create: their targets are pending, or the state
        store cannot be reached."""
        left: dict[str, str] = {}
        for alias, target in aliases.items():
            if target in pending:
                left[alias] = target
                continue
            if target not in self.projection.catalogue.versions:
                self._log.warning("alias of adapters.file left out", alias=alias, target=target)
                continue

            def point(catalogue: Catalogue, alias: str = alias, target: str = target) -> bytes | None:
                if alias in catalogue.aliases:
                    return None
                return changes.promote(catalogue, target, alias=alias, force=True)

            try:
                await self.projection.change(point, author=AUTHOR)
            except BackendUnavailable:
                left[alias] = target
            except AdapterError as error:
                self._log.error("alias of adapters.file refused", alias=alias, reason=str(error))
        return left
