"""What operators see of the adapters and do with them; each change is audited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from adapters import changes
from adapters.catalogue import Catalogue, CatalogueError, State, Version, apply
from adapters.errors import AdapterError
from adapters.registry import AdapterRegistry
from adapters.verify import Verified
from gateway.adapter_book import AdapterBook
from gateway.adapter_rooms import AdapterRooms
from gateway.adapter_source import AdapterSource
from gateway.audit import Audit
from gateway.errors import GatewayError, NoSuchAdapter
from gateway.ports import Promotion
from resilience.failures import BackendFailure

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdapterDesk:
    """Implements ``gateway.ports.AdapterService``.

    Args:
        book: the registry.
        registry: counts leases.
        rooms: what is loaded in this process.
        source: brings and checks.
        audit: who did what.
        base_model: the served one.
    """

    book: AdapterBook
    registry: AdapterRegistry
    rooms: AdapterRooms
    source: AdapterSource
    audit: Audit
    base_model: str

    def show_all(self) -> Mapping[str, object]:
        """Every version and alias, what is loaded here, what is being fetched."""
        catalogue = self.book.catalogue
        refused = self.registry.offered.refused
        return {
            "number": catalogue.number,
            "adapters": [self._shown(one, catalogue) for one in catalogue.versions.values()],
            "aliases": [self._alias(name, catalogue) for name in sorted(catalogue.aliases)],
            "refused": [{"id": name, "reason": reason} for name, reason in sorted(refused.items())],
            "places": self.rooms.places,
            "resident": sorted(self.rooms.resident),
            "fetching": [
                {"location": location, "done_bytes": one.done, "total_bytes": one.total or None}
                for location, one in sorted(self.source.progress.items())
            ],
        }

    def show(self, adapter_id: str) -> Mapping[str, object]:
        """One version, or the alias of that name. Raises NoSuchAdapter."""
        if adapter_id in self.book.catalogue.aliases:
            return self._alias(adapter_id, self.book.catalogue)
        return self._shown(self._version(adapter_id), self.book.catalogue)

    async def add(
        self,
        adapter_id: str,
        location: str,
        *,
        who: str,
        sha256: str | None = None,
        labels: Mapping[str, str] | None = None,
        base_revision: str | None = None,
        comment: str = "",
    ) -> Mapping[str, object]:
        """Bring, check and register a version, staged."""

        async def adding() -> Mapping[str, object]:
            changes.check_new(self.book.catalogue, adapter_id, labels or {})
            verified = await self.source.take(location, sha256=sha256)

            def register(catalogue: Catalogue) -> bytes | None:
                return changes.register(
                    catalogue,
                    adapter_id,
                    verified,
                    base_model=self.base_model,
                    location=location,
                    base_revision=base_revision,
                    labels=labels,
                )

            await self.book.change(register, author=who)
            return self.show(adapter_id)

        return await self._audited(who, "adapter.add", adapter_id, adding(), comment)

    async def verify(self, adapter_id: str, *, who: str) -> Mapping[str, object]:
        """Check a version's copy on this machine anew."""
        self._version(adapter_id)

        async def verifying() -> Mapping[str, object]:
            return _verified(adapter_id, await self.source.check_kept(adapter_id))

        return await self._audited(who, "adapter.verify", adapter_id, verifying())

    async def preload(self, adapter_id: str, *, who: str) -> Mapping[str, object]:
        """Load a version in this process now, ahead of its first request."""
        if self._version(adapter_id).state is State.RETIRED:
            raise CatalogueError(f"{adapter_id!r} is retired; it is not loaded any more")

        async def loading() -> Mapping[str, object]:
            await self.rooms.preload(self.book.adapter(adapter_id))
            return self.show(adapter_id)

        return await self._audited(who, "adapter.preload", adapter_id, loading())

    async def promote(self, adapter_id: str, promotion: Promotion, *, who: str) -> Mapping[str, object]:
        """Lead an alias to a version, for all sessions or a share; without an alias make it active."""
        self._version(adapter_id)
        action = "adapter.promote" + (".forced" if promotion.force else "")
        percent = promotion.percent
        detail = f"{adapter_id} as {promotion.alias or 'itself'} at {percent:g}%"
        return await self._change(
            who,
            action,
            detail,
            lambda catalogue: changes.promote(
                catalogue,
                adapter_id,
                alias=promotion.alias,
                percent=percent,
                force=promotion.force,
                comment=promotion.comment,
            ),
            show=adapter_id,
            comment=promotion.comment,
            dry_run=promotion.dry_run,
        )

    async def retire(
        self, adapter_id: str, *, who: str, comment: str = "", dry_run: bool = False
    ) -> Mapping[str, object]:
        """Serve a version no more; it is unloaded when its last request has ended."""
        self._version(adapter_id)
        return await self._change(
            who,
            "adapter.retire",
            adapter_id,
            lambda catalogue: changes.retire(catalogue, adapter_id, comment=comment),
            show=adapter_id,
            comment=comment,
            dry_run=dry_run,
        )

    async def pin(self, adapter_id: str, pinned: bool, *, who: str) -> Mapping[str, object]:
        """Keep a version loaded in every process, or no longer."""
        self._version(adapter_id)

        def pinning(catalogue: Catalogue) -> bytes | None:
            if catalogue.version(adapter_id).pinned == pinned:
                return None
            held = [one.adapter_id for one in catalogue.versions.values() if one.pinned]
            if pinned and self.rooms.places and len(held) + 1 >= max(self.rooms.places, 2):
                raise CatalogueError(
                    f"{len(held)} adapters are pinned and the engine holds {self.rooms.places}; one place "
                    "must be left for the others: take a pin away, or raise engine.max_loras"
                )
            return changes.pin(catalogue, adapter_id, pinned)

        action = "adapter.pin" if pinned else "adapter.unpin"
        return await self._change(who, action, adapter_id, pinning, show=adapter_id)

    async def label(self, adapter_id: str, labels: Mapping[str, str], *, who: str) -> Mapping[str, object]:
        """Give a version other labels."""
        self._version(adapter_id)
        return await self._change(
            who,
            "adapter.label",
            adapter_id,
            lambda catalogue: changes.label(catalogue, adapter_id, labels),
            show=adapter_id,
        )

    async def evaluated(
        self, adapter_id: str, report: Mapping[str, Any], *, who: str
    ) -> Mapping[str, object]:
        """Keep an evaluation's report with a version."""
        self._version(adapter_id)
        return await self._change(
            who,
            "adapter.evaluated",
            adapter_id,
            lambda catalogue: changes.evaluate(catalogue, adapter_id, report),
            show=adapter_id,
        )

    async def roll_back(
        self, alias: str, *, who: str, to: str | None = None, comment: str = "", dry_run: bool = False
    ) -> Mapping[str, object]:
        """Lead an alias back to the version before, or to the one named."""
        self._known_alias(alias)
        return await self._change(
            who,
            "adapter.rollback",
            alias,
            lambda catalogue: changes.roll_back(catalogue, alias, to=to, comment=comment),
            show=alias,
            comment=comment,
            dry_run=dry_run,
        )

    async def end_canary(
        self, alias: str, *, who: str, comment: str = "", dry_run: bool = False
    ) -> Mapping[str, object]:
        """Give all of an alias' sessions back to the version that has the others."""
        self._known_alias(alias)
        return await self._change(
            who,
            "adapter.end_canary",
            alias,
            lambda catalogue: changes.end_canary(catalogue, alias, comment=comment),
            show=alias,
            comment=comment,
            dry_run=dry_run,
        )

    async def _change(
        self,
        who: str,
        action: str,
        target: str,
        decide: Callable[[Catalogue], bytes | None],
        *,
        show: str,
        comment: str = "",
        dry_run: bool = False,
    ) -> Mapping[str, object]:
        """Make what ``decide`` says and show it; of a dry run what it would show, audited by nobody."""
        if dry_run:
            now = self.book.catalogue
            event = decide(now)
            then = now if event is None else apply(now, event, number=now.number + 1, author=who, at=0.0)
            found = self._alias(show, then) if show in then.aliases else self._shown(then.version(show), then)
            return {**found, "dry_run": True}

        async def changing() -> Mapping[str, object]:
            await self.book.change(decide, author=who)
            return self.show(show)

        return await self._audited(who, action, target, changing(), comment)

    async def _audited(self, who: str, action: str, target: str, doing: Awaitable[T], comment: str = "") -> T:
        try:
            done = await doing
        except (AdapterError, GatewayError, BackendFailure) as error:
            await self.audit.record(who, action, target, comment=comment, result=f"refused: {error}")
            raise
        await self.audit.record(who, action, target, comment=comment)
        return done

    def _version(self, adapter_id: str) -> Version:
        found = self.book.catalogue.versions.get(adapter_id)
        if found is None:
            raise NoSuchAdapter(f"adapter {adapter_id[:140]!r} is not registered", param="id")
        return found

    def _known_alias(self, alias: str) -> None:
        if alias not in self.book.catalogue.aliases:
            raise NoSuchAdapter(f"there is no alias {alias[:140]!r}", param="alias")

    def _alias(self, name: str, catalogue: Catalogue) -> Mapping[str, object]:
        alias = catalogue.aliases[name]
        return {
            "alias": alias.name,
            "target": alias.target,
            "canary": alias.canary,
            "percent": alias.percent if alias.canary else None,
            "history": list(alias.history),
        }

    def _shown(self, version: Version, catalogue: Catalogue) -> Mapping[str, object]:
        name = version.adapter_id
        return {
            "id": name,
            "state": version.state.value,
            "aliases": list(catalogue.named_by(name)),
            "engine_id": version.engine_id,
            "base_model": version.base_model,
            "base_revision": version.base_revision,
            "rank": version.rank,
            "alpha": version.alpha,
            "target_modules": list(version.target_modules),
            "size_bytes": version.size_bytes,
            "sha256": version.sha256,
            "location": version.location,
            "labels": dict(version.labels),
            "pinned": version.pinned,
            "resident": name in self.rooms.resident,
            "leases": self.registry.leased().get(name, 0),
            "heat": round(self.rooms.heat_of(name), 3),
            "evaluation": dict(version.report) or None,
            "author": version.author,
            "at": _time(version.at),
        }


def _verified(adapter_id: str, verified: Verified) -> Mapping[str, object]:
    return {
        "id": adapter_id,
        "verified": True,
        "rank": verified.rank,
        "alpha": verified.alpha,
        "target_modules": list(verified.target_modules),
        "size_bytes": verified.size_bytes,
        "sha256": verified.sha256,
        "base_name": verified.base_name,
        "shapes_checked": verified.shapes_checked,
    }


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
