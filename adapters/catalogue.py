"""The registry's state as an immutable value: the result of its events, applied in order.

An event is a small JSON object and never changes; a rollback is a further event. ``apply`` is pure, so every
process that has read the same events has the same catalogue. It refuses an event that contradicts earlier
ones.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from adapters.errors import AdapterError

MAX_HISTORY = 100  # earlier targets stored with an alias for its rollback


class AdapterState(StrEnum):
    """A version's state: ``staged → canary → active → retired``."""

    STAGED = "staged"
    CANARY = "canary"
    ACTIVE = "active"
    RETIRED = "retired"


# A retired version does not return: its replacement is registered under another name, so that no engine can
# answer from the old version's cache.
TRANSITIONS: Mapping[AdapterState, frozenset[AdapterState]] = {
    AdapterState.STAGED: frozenset({AdapterState.CANARY, AdapterState.ACTIVE, AdapterState.RETIRED}),
    AdapterState.CANARY: frozenset({AdapterState.STAGED, AdapterState.ACTIVE, AdapterState.RETIRED}),
    AdapterState.ACTIVE: frozenset({AdapterState.ACTIVE, AdapterState.RETIRED}),
    AdapterState.RETIRED: frozenset(),
}


class CatalogueError(AdapterError):
    """The registry's rules do not allow the change; the message says what they allow."""


@dataclass(frozen=True, slots=True)
class Version:
    """One registered version; only state, pin and report ever change.

    ``engine_id`` is the number of the event that registered the version, so it is never reused; ``location``
    is the source (a folder, an archive, ``s3://…``); ``report`` the last evaluation: ``passed``, ``signed``
    and more; ``author`` and ``at`` (Unix seconds) are of the registration.
    """

    adapter_id: str
    engine_id: int
    base_model: str
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    size_bytes: int
    sha256: str
    location: str
    author: str
    at: float
    base_revision: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    state: AdapterState = AdapterState.STAGED
    pinned: bool = False
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the last evaluation passed, and was made by `sluice evaluate` for this content."""
        return self.report.get("passed") is True and self.report.get("signed") is True


@dataclass(frozen=True, slots=True)
class Alias:
    """A name for the version ``target``, and for a share of the sessions for the version ``canary``.

    ``canary`` gets ``percent`` of the sessions; ``history`` are the earlier targets, the latest last.
    """

    name: str
    target: str | None
    canary: str | None = None
    percent: float = 0.0
    history: tuple[str, ...] = ()

    def resolve(self, fraction: float) -> str | None:
        """The version for a session at ``fraction`` (0 to 1); a session on the canary stays on it when the
        share grows."""
        return self.canary if self.canary is not None and fraction * 100 < self.percent else self.target


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All versions and aliases; ``number`` is that of the last event."""

    number: int = 0
    versions: Mapping[str, Version] = field(default_factory=dict)
    aliases: Mapping[str, Alias] = field(default_factory=dict)

    def version(self, adapter_id: str) -> Version:
        """The version of that name. Raises CatalogueError for a name that is not registered."""
        found = self.versions.get(adapter_id)
        if found is None:
            listed = ", ".join(sorted(self.versions)[:10]) or "none"
            raise CatalogueError(f"adapter {adapter_id!r} is not registered; known: {listed}")
        return found

    def named_by(self, adapter_id: str) -> tuple[str, ...]:
        return tuple(sorted(a.name for a in self.aliases.values() if adapter_id in (a.target, a.canary)))


def apply(catalogue: Catalogue, data: bytes, *, number: int, author: str, at: float) -> Catalogue:
    """The catalogue after one more event.

    Raises CatalogueError when the event contradicts earlier ones, or is of a kind that only a newer version
    of the gateway knows.
    """
    if number != catalogue.number + 1:
        raise CatalogueError(f"event {number} does not follow {catalogue.number}")
    try:
        event = {**json.loads(data), "number": number, "author": author, "at": at}
        after = _CHANGES[event["event"]](catalogue, event)
    except (ValueError, KeyError, TypeError) as error:
        raise CatalogueError(f"event {number} cannot be understood ({type(error).__name__})") from None
    return replace(after, number=number)


def _registered(catalogue: Catalogue, event: Mapping[str, Any]) -> Catalogue:
    fields = event["adapter"]
    name = str(fields["id"])
    if name in catalogue.versions or name in catalogue.aliases:
        raise CatalogueError(f"the name {name!r} is taken; register another one")
    version = Version(
        adapter_id=name,
        engine_id=event["number"],
        base_model=str(fields["base_model"]),
        base_revision=fields.get("base_revision"),
        rank=int(fields["rank"]),
        alpha=float(fields["alpha"]),
        target_modules=tuple(map(str, fields["target_modules"])),
        size_bytes=int(fields["size_bytes"]),
        sha256=str(fields["sha256"]),
        location=str(fields["location"]),
        labels=MappingProxyType({str(key): str(value) for key, value in fields.get("labels", {}).items()}),
        author=event["author"],
        at=event["at"],
    )
    return _with(catalogue, version)


def _promoted(catalogue: Catalogue, event: Mapping[str, Any]) -> Catalogue:
    version, percent = catalogue.version(event["id"]), float(event["percent"])
    if event["alias"] is None:
        if percent != 100:
            raise CatalogueError("a canary is a share of an alias; name the alias")
        return _with(catalogue, _moved(version, AdapterState.ACTIVE))
    name = str(event["alias"])
    if name in catalogue.versions:
        raise CatalogueError(f"the alias {name!r} is a version's name; choose another one")
    if not 0 < percent <= 100:
        raise CatalogueError(f"percent is {percent:g}; allowed: above 0, at most 100")
    alias = catalogue.aliases.get(name, Alias(name, None))
    if percent < 100:
        if version.adapter_id == alias.target:
            raise CatalogueError(f"{version.adapter_id!r} has all of {name!r}; a canary is another version")
        after = _end_canary(catalogue, alias, replaced_by=version)
        moved = replace(alias, canary=version.adapter_id, percent=percent)
        state = version.state if version.state is AdapterState.ACTIVE else AdapterState.CANARY
        return _with(_aliased(after, moved), _moved(version, state))
    after = _end_canary(_aliased(catalogue, _to(alias, version.adapter_id)), alias, replaced_by=version)
    return _with(after, _moved(version, AdapterState.ACTIVE))


def _rolled_back(catalogue: Catalogue, event: Mapping[str, Any]) -> Catalogue:
    alias = catalogue.aliases.get(str(event["alias"]))
    if alias is None:
        raise CatalogueError(f"there is no alias {event['alias']!r}")
    target = catalogue.version(event["to"])
    if target.state is AdapterState.RETIRED:
        raise CatalogueError(f"{target.adapter_id!r} is retired; choose another version")
    after = _with(_aliased(catalogue, _to(alias, target.adapter_id)), _moved(target, AdapterState.ACTIVE))
    return _end_canary(after, alias, replaced_by=target)


def _ended_canary(catalogue: Catalogue, event: Mapping[str, Any]) -> Catalogue:
    alias = catalogue.aliases.get(str(event["alias"]))
    if alias is None or alias.canary is None:
        raise CatalogueError(f"{event['alias']!r} has no canary")
    return _end_canary(_aliased(catalogue, replace(alias, canary=None, percent=0.0)), alias)


def _retired(catalogue: Catalogue, event: Mapping[str, Any]) -> Catalogue:
    version = catalogue.version(event["id"])
    names = catalogue.named_by(version.adapter_id)
    if names:
        first = (
            "end its canary (end-canary)"
            if version.state is AdapterState.CANARY
            else "promote another version"
        )
        raise CatalogueError(f"{version.adapter_id!r} is what {', '.join(names)} leads to; {first} first")
    return _with(catalogue, replace(_moved(version, AdapterState.RETIRED), pinned=False))


def _evaluated(catalogue: Catalogue, event: Mapping[str, Any]) -> Catalogue:
    report = dict(event["report"])
    if not isinstance(report.get("passed"), bool):
        raise CatalogueError("a report says whether it passed (passed: true or false)")
    report |= {"author": event["author"], "at": event["at"]}
    return _with(catalogue, replace(catalogue.version(event["id"]), report=MappingProxyType(report)))


def _pinned(catalogue: Catalogue, event: Mapping[str, Any]) -> Catalogue:
    version = catalogue.version(event["id"])
    if event["pinned"] and version.state is AdapterState.RETIRED:
        raise CatalogueError(f"{version.adapter_id!r} is retired; it is not loaded any more")
    return _with(catalogue, replace(version, pinned=bool(event["pinned"])))


_CHANGES = MappingProxyType(
    {
        "registered": _registered,
        "promoted": _promoted,
        "rolled_back": _rolled_back,
        "canary_ended": _ended_canary,
        "retired": _retired,
        "evaluated": _evaluated,
        "pinned": _pinned,
    }
)


def _moved(version: Version, state: AdapterState) -> Version:
    if state is not version.state and state not in TRANSITIONS[version.state]:
        allowed = ", ".join(sorted(TRANSITIONS[version.state])) or "nothing"
        raise CatalogueError(
            f"{version.adapter_id!r} is {version.state}; from there it may become: {allowed}"
        )
    return replace(version, state=state)


def _to(alias: Alias, target: str) -> Alias:
    """The alias with one version as its only target."""
    past = () if alias.target in (None, target) else (str(alias.target),)
    return Alias(alias.name, target, history=(*alias.history, *past)[-MAX_HISTORY:])


def _end_canary(catalogue: Catalogue, alias: Alias, replaced_by: Version | None = None) -> Catalogue:
    """Stage the alias' former canary again, unless it is ``replaced_by``, or another alias uses it."""
    if alias.canary is None or (replaced_by is not None and alias.canary == replaced_by.adapter_id):
        return catalogue
    version = catalogue.version(alias.canary)
    elsewhere = set(catalogue.named_by(alias.canary)) - {alias.name}
    if version.state is not AdapterState.CANARY or elsewhere:
        return catalogue
    return _with(catalogue, _moved(version, AdapterState.STAGED))


def _with(catalogue: Catalogue, version: Version) -> Catalogue:
    return replace(catalogue, versions=MappingProxyType({**catalogue.versions, version.adapter_id: version}))


def _aliased(catalogue: Catalogue, alias: Alias) -> Catalogue:
    return replace(catalogue, aliases=MappingProxyType({**catalogue.aliases, alias.name: alias}))
