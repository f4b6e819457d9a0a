"""The routing's revisions for operators: show, change, undo; each change is audited."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, cast

from pydantic import Field
from typing_extensions import TypedDict

from gateway.contracts.fields import Body
from gateway.contracts.times import iso_time
from gateway.errors import InvalidRequest, UnknownRoute
from gateway.routing import change
from gateway.routing.projection import RoutingProjection, UnusableRevision
from gateway.routing.records import Draft, Stored
from gateway.routing.refusals import operator_errors
from gateway.state.audit import Audit

# The revisions per read in the search for an earlier configuration, and the most that are searched.
PAGE = 50
SEARCHED = 1_000


class RouteChangeBody(Body):
    """The fields of every change."""

    comment: Annotated[str, Field(max_length=1_000)] = ""
    expected_revision: Annotated[int, Field(ge=0)] | None = None
    """The revision that must be the last one; ``None``: no check."""
    dry_run: bool = False
    """Validate and show what would change; change nothing."""


class RouteApplyBody(RouteChangeBody):
    """A whole configuration, validated like a routing file."""

    config: dict[str, Any]


class RoutePromoteBody(RouteChangeBody):
    """The backend that gets the whole route."""

    route: str
    backend: str


class RouteWeightBody(RoutePromoteBody):
    """The share of a route that a backend gets."""

    percent: Annotated[float, Field(ge=0, le=change.WHOLE)]


class RouteRollbackBody(RouteChangeBody):
    """The revision to return to; unset: the last one with another configuration."""

    to: Annotated[int, Field(ge=1, lt=1 << 63)] | None = None


class RevisionBody(TypedDict):
    """A routing revision."""

    revision: int
    author: str
    created_at: str
    comment: str
    action: str
    parent: int
    config: Mapping[str, Any]


class RevisionInForceBody(RevisionBody):
    """The revision in force in this process."""

    in_force_since: str
    behind: UnusableRevision | None


class RevisionMadeBody(TypedDict):
    """The new revision; after a dry run without number, author and time."""

    revision: int | None
    parent: int
    comment: str
    config: Mapping[str, Any]
    changes: list[change.ConfigChange]
    author: NotRequired[str]
    created_at: NotRequired[str]
    action: NotRequired[str]
    dry_run: NotRequired[bool]


class AuditEntry(TypedDict):
    """An operator's action, done or refused."""

    number: int
    at: str
    who: str
    action: str
    target: str
    result: str
    comment: str
    previous: str
    """The hash of the previous record."""
    mac: NotRequired[str]
    """The signature of the record, if the gateway has a key for it."""
    hash: str


Make = Callable[[Stored], Mapping[str, object]]  # makes a configuration of the last revision


@dataclass(frozen=True, slots=True)
class RoutingAdmin:
    """Shows and changes the revisions; ``who`` is the key's id.

    A change is in force in this process when the call returns, in every other process within a second. It
    raises InvalidRequest (with every fault and its path), UnknownRoute, RevisionConflict (another change came
    first) and BackendUnavailable (the state store is unreachable); reads raise only the last.
    """

    revisions: RoutingProjection
    audit_log: Audit

    def show(self) -> RevisionInForceBody:
        stored = self.revisions.in_force
        if stored is None:
            raise RuntimeError("there is no routing yet")
        return {
            **_shown(stored),
            "in_force_since": iso_time(self.revisions.in_force_since, "milliseconds"),
            "behind": self.revisions.unusable,
        }

    async def apply(self, given: RouteApplyBody, *, who: str) -> RevisionMadeBody:
        config = await asyncio.to_thread(change.typed, given.config)
        return await self._change("apply", "routing", lambda _: config, given, who)

    async def set_weight(self, given: RouteWeightBody, *, who: str) -> RevisionMadeBody:
        target = f"{given.route}: {given.backend} at {given.percent:g} %"
        return await self._change("weights", target, self._weight(given, given.percent), given, who)

    async def promote(self, given: RoutePromoteBody, *, who: str) -> RevisionMadeBody:
        target = f"{given.route}: {given.backend}"
        return await self._change("promote", target, self._weight(given, change.WHOLE), given, who)

    def _weight(self, given: RoutePromoteBody, percent: float) -> Make:
        def make(last: Stored) -> dict[str, Any]:
            changed = change.with_weight(last.draft.config, given.route, given.backend, percent)
            self.revisions.check_backend(given.backend)
            return changed

        return make

    async def roll_back(self, given: RouteRollbackBody, *, who: str) -> RevisionMadeBody:
        target = "to the one before" if given.to is None else f"to revision {given.to}"
        return await self._audited("rollback", target, given, who, lambda: self._rolled_back(given, who))

    async def history(self, limit: int) -> list[RevisionBody]:
        with operator_errors(change=False):
            found = await self.revisions.newest(limit)
        return [_shown(stored) for stored in found]

    async def diff(self, a: int, b: int) -> list[change.ConfigChange]:
        with operator_errors(change=False):
            before, after = await self._revision(a, "a"), await self._revision(b, "b")
        return await _differences(before.draft, after.draft)

    async def audit(self, limit: int, after: int | None = None) -> list[AuditEntry]:
        with operator_errors(change=False):
            return [cast("AuditEntry", entry) for entry in await self.audit_log.entries(limit, after)]

    async def _change(
        self, action: str, target: str, make: Make, given: RouteChangeBody, who: str
    ) -> RevisionMadeBody:
        return await self._audited(action, target, given, who, lambda: self._made(action, make, given, who))

    async def _rolled_back(self, given: RouteRollbackBody, who: str) -> RevisionMadeBody:
        self.revisions.followed.check_complete()
        await self.revisions.expect_last(given.expected_revision)
        # Another process may just have made a revision; one that is made from now on is a conflict.
        for newest in await self.revisions.newest(1):
            await self.revisions.caught_up_to(newest.number)
        head = self.revisions.head
        if given.to is None:
            source, config = await self._other(head)
        else:
            source = await self._revision(given.to, "to")
            config = source.draft.config
        but = "" if await _same(config, source.draft.config) else ", except the canary's weights"
        comment = ": ".join(filter(None, (f"rollback to revision {source.number}{but}", given.comment)))
        asked = given.model_copy(update={"comment": comment, "expected_revision": head})
        return await self._made("rollback", lambda last: config, asked, who)

    async def _made(self, action: str, make: Make, given: RouteChangeBody, who: str) -> RevisionMadeBody:
        """Make the change, unless it is a dry run, or alters nothing and has no comment to record."""

        def decide(last: Stored) -> Draft:
            config, canary = make(last), last.draft.canary
            if canary is not None and not _same_on(canary.route, config, last.draft.config):
                canary = None  # this change ends the canary
            return Draft(config, given.comment, action, canary)

        await self.revisions.expect_last(given.expected_revision)
        last = self.revisions.last()
        draft = decide(last)
        if given.dry_run:
            await self.revisions.check(draft)
            return {
                "dry_run": True,
                "revision": None,
                "parent": self.revisions.head,
                "comment": draft.comment,
                "config": draft.config,
                "changes": await _differences(last.draft, draft),
            }
        in_force = last.number == self.revisions.head and self.revisions.unusable is None
        if in_force and not draft.comment and await _same(draft.config, last.draft.config):
            return {**_shown(last), "changes": []}  # type: ignore[typeddict-item]  # as below
        before, stored = await self.revisions.change(decide, author=who, expected=given.expected_revision)
        changes = await _differences(before.draft, stored.draft)
        return {**_shown(stored), "changes": changes}  # type: ignore[typeddict-item]  # mypy: dry_run may be in it

    async def _audited(
        self,
        action: str,
        target: str,
        given: RouteChangeBody,
        who: str,
        begin: Callable[[], Awaitable[RevisionMadeBody]],
    ) -> RevisionMadeBody:
        if given.dry_run:
            with operator_errors(expected=given.expected_revision):
                return await begin()
        async with self.audit_log.attempt(who, f"routing.{action}", target, comment=given.comment) as audited:
            with operator_errors(expected=given.expected_revision):
                done = await begin()
            audited.result = f"revision {done['revision']}"
            return done

    async def _revision(self, number: int, param: str) -> Stored:
        # Read from the store: this process may not have received another process's revision yet.
        for stored in await self.revisions.read(number):
            if stored.number == number:
                return stored
        raise InvalidRequest(
            f"{param}: there is no revision {number}; allowed: 1 to {self.revisions.head}", param=param
        )

    async def _other(self, head: int) -> tuple[Stored, Mapping[str, Any]]:
        """Return the last revision before ``head`` that says something else, and what it says.

        This is its configuration but for the weights of a canary (:meth:`Draft.beside`).
        """
        now, number = self.revisions.last(), head
        while number > max(head - SEARCHED, 0):
            for stored in await self.revisions.read(number, PAGE):
                config = stored.draft.beside(now.draft)
                if not await _same(config, now.draft.config):
                    return stored, config
            number -= PAGE
        raise InvalidRequest("to: no earlier revision says anything else; name one by its number", param="to")


# In a thread: thousands of changed routes take a second.
async def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return await asyncio.to_thread(change.same, one, other)


async def _differences(before: Draft, after: Draft) -> list[change.ConfigChange]:
    return await asyncio.to_thread(change.differences, before.config, after.config)


def _same_on(route: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a route has the same weights in two configurations."""
    try:
        return change.same_weights(change.weights_of(one, route), change.weights_of(other, route))
    except (UnknownRoute, KeyError, TypeError, ValueError):
        return False  # an invalid configuration is refused later


def _shown(stored: Stored) -> RevisionBody:
    return {
        "revision": stored.number,
        "author": stored.author,
        "created_at": iso_time(stored.at, "milliseconds"),
        "comment": stored.draft.comment,
        "action": stored.draft.action,
        "parent": stored.parent,
        "config": stored.draft.config,
    }
