"""The LoRA registry for operators: add, check, promote, retire versions; each change is audited."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Final, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from adapters import changes
from adapters.catalogue import AdapterState, Alias, Catalogue, CatalogueError, Version, apply
from adapters.registry import AdapterRegistry
from adapters.verify import Verified
from gateway.contracts.evaluation_report import is_signed
from gateway.contracts.fields import Body, from_attributes
from gateway.contracts.times import iso_time
from gateway.errors import NoSuchAdapter
from gateway.lora.fetch import AdapterSource
from gateway.lora.loader import LoraLoader
from gateway.lora.preload_orders import AdapterOrders
from gateway.lora.registry import AdapterProjection
from gateway.state.audit import Audit

_Labels = Annotated[dict[str, str], Field(max_length=32)]


class CommentBody(Body):
    """The reason of a change; a dry run changes nothing and returns the result as it would be."""

    comment: Annotated[str, Field(max_length=1_000)] = ""
    dry_run: bool = False


class AddBody(CommentBody):
    """A new version: its name and location (a folder, an archive, ``s3://bucket/prefix``)."""

    id: str
    location: Annotated[str, Field(min_length=1, max_length=1_024)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    labels: _Labels = Field(default_factory=dict)
    base_revision: Annotated[str, Field(max_length=256)] | None = None


class PromoteBody(CommentBody):
    """The alias to which a version is promoted; below 100 percent it becomes a canary of the alias."""

    alias: str | None = None
    percent: Annotated[float, Field(gt=0, le=100)] = 100.0
    force: bool = False
    """Promote without a passing evaluation."""


class RollbackBody(CommentBody):
    """The version to return to; unset: the previous one."""

    to: str | None = None


class ReportBody(Body):
    """An evaluation's report; it is valid if `sluice evaluate` signed it."""

    report: dict[str, Any]


class AdapterBody(TypedDict):
    """One version of an adapter, and its state in this process."""

    id: str
    state: str
    aliases: list[str]
    engine_id: int
    base_model: str
    base_revision: str | None
    rank: int
    alpha: float
    target_modules: list[str]
    size_bytes: int
    sha256: str
    location: str
    labels: dict[str, str]
    pinned: bool
    resident: bool
    leases: int
    heat: float
    evaluation: dict[str, Any] | None
    author: str
    at: str
    dry_run: NotRequired[bool]
    others_told: NotRequired[bool]


class AliasBody(TypedDict):
    """A name for a version, and for a canary that gets some percent of the name's sessions."""

    alias: str
    target: str | None
    canary: str | None
    percent: float | None
    history: list[str]
    dry_run: NotRequired[bool]


class RefusedAdapter(TypedDict):
    """A version that this process cannot serve, and the reason."""

    id: str
    reason: str


class AdapterFetch(TypedDict):
    """A download in progress."""

    location: str
    done_bytes: int
    total_bytes: int | None


class AdaptersBody(TypedDict):
    """Versions, aliases, and the adapters that this process has loaded or is fetching."""

    number: int
    adapters: list[AdapterBody]
    aliases: list[AliasBody]
    refused: list[RefusedAdapter]
    places: int
    resident: list[str]
    fetching: list[AdapterFetch]


@dataclass(frozen=True, slots=True)
class VerifiedBody(Verified):
    """The result of checking a version's copy."""

    id: str
    verified: bool = True


AdapterOrAlias = AdapterBody | AliasBody
_OF_ALIASES: Final = frozenset({"rollback", "end_canary"})
Decide = Callable[[Catalogue], bytes | None]


@dataclass(frozen=True, slots=True)
class AdapterAdmin:
    """Shows and changes the registry; ``who`` is the key's id.

    A change is in force in this process when the call returns, in every other process within a second. It
    raises NoSuchAdapter, AdapterRejected, AdapterNotHere, CatalogueError, NotEvaluatedError,
    BackendUnavailable (the state store is unreachable) and BackendFailure (the engine).

    Args:
        loader: loads adapters in this process.
        routed: returns the paths of the rules, in the routing in force, that name an adapter.
        evaluation_key: verifies the signature of reports.
    """

    projection: AdapterProjection
    registry: AdapterRegistry
    loader: LoraLoader
    orders: AdapterOrders
    source: AdapterSource
    audit: Audit
    base_model: str
    routed: Callable[[str], Sequence[str]]
    evaluation_key: bytes

    def show_all(self) -> AdaptersBody:
        catalogue = self.projection.catalogue
        refused = self.registry.offered.refused
        return {
            "number": catalogue.number,
            "adapters": [self._version_shown(one, catalogue) for one in catalogue.versions.values()],
            "aliases": [_alias_shown(alias) for _, alias in sorted(catalogue.aliases.items())],
            "refused": [{"id": name, "reason": reason} for name, reason in sorted(refused.items())],
            "places": self.loader.places,
            "resident": sorted(self.loader.resident),
            "fetching": [
                {"location": location, "done_bytes": one.done, "total_bytes": one.total or None}
                for location, one in sorted(self.source.progress.items())
            ],
        }

    def show(self, name: str) -> AdapterOrAlias:
        """Return the version or the alias of that name. Raises NoSuchAdapter."""
        if name not in self.projection.catalogue.aliases:
            self._version(name)
        return self._shown(name, self.projection.catalogue)

    async def add(self, given: AddBody, *, who: str) -> AdapterOrAlias:
        async def registering(check: Callable[..., Awaitable[Verified]]) -> Decide:
            changes.check_new(self.projection.catalogue, given.id, given.labels)
            verified = await check(given.location, sha256=given.sha256)
            return lambda catalogue: changes.register(
                catalogue,
                given.id,
                verified,
                base_model=self.base_model,
                location=given.location,
                base_revision=given.base_revision,
                labels=given.labels,
            )

        if given.dry_run:
            return self._preview(await registering(self.source.check), given.id, who)
        async with self.audit.attempt(who, "adapter.add", given.id, comment=given.comment):
            await self.projection.change(await registering(self.source.take), author=who)
            return self.show(given.id)

    async def verify(self, adapter_id: str, *, who: str) -> VerifiedBody:
        self._version(adapter_id)
        async with self.audit.attempt(who, "adapter.verify", adapter_id):
            verified = await self.source.check_kept(adapter_id)
        return VerifiedBody(**asdict(verified), id=adapter_id)

    async def preload(self, adapter_id: str, *, who: str) -> AdapterBody:
        """Load a version now, before its first request, here and in every other gateway process.

        ``others_told`` of the answer is whether the order reached the state store; each process loads the
        version independently, and logs a failure.
        """
        if self._version(adapter_id).state is AdapterState.RETIRED:
            raise CatalogueError(f"{adapter_id!r} is retired; it is not loaded any more")
        async with self.audit.attempt(who, "adapter.preload", adapter_id):
            ordered = await self.orders.send(adapter_id, self.projection.catalogue.number, author=who)
            await self.loader.preload(self.projection.adapter(adapter_id))
            shown = self._version_shown(self._version(adapter_id), self.projection.catalogue)
            return {**shown, "others_told": ordered}

    async def promote(self, adapter_id: str, given: PromoteBody, *, who: str) -> AdapterOrAlias:
        """Point an alias to a version, for all sessions or a share; without an alias, make it active."""
        return await self._change(
            who,
            "promote.forced" if given.force else "promote",
            adapter_id,
            partial(changes.promote, adapter_id=adapter_id, **given.model_dump(exclude={"dry_run"})),
            given,
            target=f"{adapter_id} as {given.alias or 'itself'} at {given.percent:g}%",
        )

    async def retire(self, adapter_id: str, given: CommentBody, *, who: str) -> AdapterOrAlias:
        """Stop serving a version; it is unloaded when its last request has ended."""

        def retiring(catalogue: Catalogue) -> bytes:
            rules = self.routed(adapter_id)
            if rules:
                raise CatalogueError(
                    f"{adapter_id!r} is what {', '.join(rules)} of the routing leads to, and its requests "
                    "would be refused; change the routing first"
                )
            return changes.retire(catalogue, adapter_id, comment=given.comment)

        return await self._change(who, "retire", adapter_id, retiring, given)

    async def pin(self, adapter_id: str, pinned: bool, *, who: str) -> AdapterOrAlias:
        """Keep a version loaded in every process, or no longer."""

        def pinning(catalogue: Catalogue) -> bytes | None:
            version = catalogue.version(adapter_id)
            if version.pinned == pinned:
                return None
            # Engines of other base models have places of their own.
            base = version.base_model
            count = sum(one.pinned and one.base_model == base for one in catalogue.versions.values())
            places = self.loader.least_places
            if pinned and places and count + 1 >= max(places, 2):
                raise CatalogueError(
                    f"{count} adapters are pinned, and the engine or a worker holds {places}; one place "
                    "must be left for the others: take a pin away, or raise engine.max_loras (of workers: "
                    "max_loaded_adapters)"
                )
            return changes.pin(catalogue, adapter_id, pinned)

        return await self._change(who, "pin" if pinned else "unpin", adapter_id, pinning)

    async def evaluated(self, adapter_id: str, given: ReportBody, *, who: str) -> AdapterOrAlias:
        signed = is_signed(given.report, self.evaluation_key)
        return await self._change(
            who,
            "evaluated",
            adapter_id,
            lambda now: changes.evaluate(now, adapter_id, given.report, signed=signed),
        )

    async def roll_back(self, alias: str, given: RollbackBody, *, who: str) -> AdapterOrAlias:
        return await self._change(
            who,
            "rollback",
            alias,
            lambda now: changes.roll_back(now, alias, to=given.to, comment=given.comment),
            given,
        )

    async def end_canary(self, alias: str, given: CommentBody, *, who: str) -> AdapterOrAlias:
        return await self._change(
            who, "end_canary", alias, lambda now: changes.end_canary(now, alias, comment=given.comment), given
        )

    async def _change(
        self,
        who: str,
        action: str,
        name: str,
        decide: Decide,
        given: CommentBody = CommentBody(),  # noqa: B008  # frozen
        *,
        target: str = "",
    ) -> AdapterOrAlias:
        """Make the change and return ``name``'s state; a dry run returns it as it would be, unaudited."""
        if action not in _OF_ALIASES:
            self._version(name)
        elif name not in self.projection.catalogue.aliases:
            raise NoSuchAdapter(f"there is no alias {name[:140]!r}", param="alias")
        if given.dry_run:
            return self._preview(decide, name, who)
        async with self.audit.attempt(who, f"adapter.{action}", target or name, comment=given.comment):
            await self.projection.change(decide, author=who)
            return self.show(name)

    def _preview(self, decide: Decide, name: str, who: str) -> AdapterOrAlias:
        now = self.projection.catalogue
        then, event = now, decide(now)
        if event is not None:
            then = apply(now, event, number=now.number + 1, author=who, at=self.audit.unix_time())
        shown = self._shown(name, then)
        shown["dry_run"] = True
        return shown

    def _version(self, adapter_id: str) -> Version:
        catalogue = self.projection.catalogue
        found = catalogue.versions.get(adapter_id)
        if found is None:
            alias = catalogue.aliases.get(adapter_id)
            what = (
                "is not registered" if alias is None else f"is an alias; name its version, {alias.target!r}"
            )
            raise NoSuchAdapter(f"adapter {adapter_id[:140]!r} {what}", param="id")
        return found

    def _shown(self, name: str, catalogue: Catalogue) -> AdapterOrAlias:
        if name in catalogue.aliases:
            return _alias_shown(catalogue.aliases[name])
        return self._version_shown(catalogue.version(name), catalogue)

    def _version_shown(self, version: Version, catalogue: Catalogue) -> AdapterBody:
        name = version.adapter_id
        return from_attributes(
            AdapterBody,
            version,
            id=name,
            state=version.state.value,
            aliases=list(catalogue.named_by(name)),
            target_modules=list(version.target_modules),
            labels=dict(version.labels),
            resident=name in self.loader.resident,
            leases=self.registry.leased().get(name, 0),
            heat=round(self.loader.demand_of(name), 3),
            evaluation=dict(version.report) or None,
            at=iso_time(version.at),
        )


def _alias_shown(alias: Alias) -> AliasBody:
    percent = alias.percent if alias.canary else None
    return from_attributes(AliasBody, alias, alias=alias.name, percent=percent, history=list(alias.history))
