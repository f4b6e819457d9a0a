"""What operators see of the adapters and do with them; each change is audited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from adapters import changes
from adapters.catalogue import AdapterState, Alias, Catalogue, CatalogueError, Version, apply
from adapters.errors import AdapterError, AdapterRejected
from adapters.registry import AdapterRegistry
from adapters.verify import Verified
from gateway.admin.ports import Promotion
from gateway.errors import GatewayError, NoSuchAdapter
from gateway.lora.fetch import AdapterSource
from gateway.lora.loader import LoraLoader
from gateway.lora.preload_orders import AdapterOrders
from gateway.lora.registry import AdapterProjection
from gateway.state.audit import Audit
from resilience.failures import BackendFailure


def alias_page(alias: Alias) -> Mapping[str, object]:
    """An alias and where it led before."""
    return {
        "alias": alias.name,
        "target": alias.target,
        "canary": alias.canary,
        "percent": alias.percent if alias.canary else None,
        "history": list(alias.history),
    }


def version_page(
    version: Version, catalogue: Catalogue, *, resident: bool, leases: int, heat: float
) -> Mapping[str, object]:
    """A version, and how it stands in this process."""
    return {
        "id": version.adapter_id,
        "state": version.state.value,
        "aliases": list(catalogue.named_by(version.adapter_id)),
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
        "resident": resident,
        "leases": leases,
        "heat": round(heat, 3),
        "evaluation": dict(version.report) or None,
        "author": version.author,
        "at": datetime.fromtimestamp(version.at, UTC).isoformat(timespec="seconds"),
    }


def verified_page(adapter_id: str, verified: Verified) -> Mapping[str, object]:
    """What a check has found."""
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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdapterAdmin:
    """Implements ``gateway.ports.AdapterService``.

    Args:
        book: the registry.
        registry: counts leases.
        rooms: what is loaded in this process.
        orders: to the other processes.
        source: brings and checks.
        audit: who did what.
        base_model: the served one.
        routed: where the routing in force names an adapter: paths of its rules.
    """

    book: AdapterProjection
    registry: AdapterRegistry
    rooms: LoraLoader
    orders: AdapterOrders
    source: AdapterSource
    audit: Audit
    base_model: str
    routed: Callable[[str], Sequence[str]]

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
        dry_run: bool = False,
    ) -> Mapping[str, object]:
        """Bring, check and register a version, staged; of a dry run only bring and check."""

        async def checked(check: Callable[..., Awaitable[Verified]]) -> Verified:
            changes.check_new(self.book.catalogue, adapter_id, labels or {})
            try:
                return await check(location, sha256=sha256)
            except AdapterRejected as error:
                raise AdapterRejected(error.code, f"{location}: {error.detail}") from error

        def registering(verified: Verified) -> Callable[[Catalogue], bytes | None]:
            return lambda catalogue: changes.register(
                catalogue,
                adapter_id,
                verified,
                base_model=self.base_model,
                location=location,
                base_revision=base_revision,
                labels=labels,
            )

        async def adding() -> Mapping[str, object]:
            await self.book.change(registering(await checked(self.source.take)), author=who)
            return self.show(adapter_id)

        if dry_run:
            return self._preview(registering(await checked(self.source.check)), adapter_id, who)
        return await self._audited(who, "adapter.add", adapter_id, adding(), comment)

    async def verify(self, adapter_id: str, *, who: str) -> Mapping[str, object]:
        """Check a version's copy on this machine anew."""
        self._version(adapter_id)

        async def verifying() -> Mapping[str, object]:
            return verified_page(adapter_id, await self.source.check_kept(adapter_id))

        return await self._audited(who, "adapter.verify", adapter_id, verifying())

    async def preload(self, adapter_id: str, *, who: str) -> Mapping[str, object]:
        """Load a version now, ahead of its first request, here and in every other gateway process.

        ``others_told`` of the answer says whether the others have the order; each tries on its own, and logs
        what fails.
        """
        if self._version(adapter_id).state is AdapterState.RETIRED:
            raise CatalogueError(f"{adapter_id!r} is retired; it is not loaded any more")

        async def loading() -> Mapping[str, object]:
            told = await self.orders.tell(adapter_id, self.book.catalogue.number, author=who)
            await self.rooms.preload(self.book.adapter(adapter_id))
            return {**self.show(adapter_id), "others_told": told}

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

        def retiring(catalogue: Catalogue) -> bytes:
            rules = self.routed(adapter_id)
            if rules:
                raise CatalogueError(
                    f"{adapter_id!r} is what {', '.join(rules)} of the routing leads to, and its requests "
                    "would be refused; change the routing first"
                )
            return changes.retire(catalogue, adapter_id, comment=comment)

        return await self._change(
            who,
            "adapter.retire",
            adapter_id,
            retiring,
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
            places = self.rooms.least_places
            if pinned and places and len(held) + 1 >= max(places, 2):
                raise CatalogueError(
                    f"{len(held)} adapters are pinned, and the engine or a worker holds {places}; one place "
                    "must be left for the others: take a pin away, or raise engine.max_loras (of workers: "
                    "max_loaded_adapters)"
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
            return self._preview(decide, show, who)

        async def changing() -> Mapping[str, object]:
            await self.book.change(decide, author=who)
            return self.show(show)

        return await self._audited(who, action, target, changing(), comment)

    def _preview(
        self, decide: Callable[[Catalogue], bytes | None], show: str, who: str
    ) -> Mapping[str, object]:
        now = self.book.catalogue
        event = decide(now)
        then = now if event is None else apply(now, event, number=now.number + 1, author=who, at=0.0)
        found = self._alias(show, then) if show in then.aliases else self._shown(then.version(show), then)
        return {**found, "dry_run": True}

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
        return alias_page(catalogue.aliases[name])

    def _shown(self, version: Version, catalogue: Catalogue) -> Mapping[str, object]:
        name = version.adapter_id
        return version_page(
            version,
            catalogue,
            resident=name in self.rooms.resident,
            leases=self.registry.leased().get(name, 0),
            heat=self.rooms.demand_of(name),
        )
