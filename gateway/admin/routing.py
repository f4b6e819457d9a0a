"""What operators see of the routing and do with it; each change is audited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from gateway.admin.ports import RoutingOrder
from gateway.errors import BackendUnavailable, GatewayError, InvalidRequest, RevisionConflict, UnknownRoute
from gateway.routing.change import (
    WHOLE,
    NoSuchRoute,
    NothingToShare,
    differences,
    same,
    with_weight,
)
from gateway.routing.projection import NotInForce, RoutingBusy, RoutingProjection
from gateway.routing.records import Draft, Stored
from gateway.routing.revision import RoutingFileError
from gateway.state.audit import Audit
from gateway.state.errors import Conflict, RecordTooLarge, StateUnavailable

# Revisions of one look while an earlier configuration is searched, and how many are looked at in all.
PAGE = 50
SEARCHED = 1_000
# Others that may come between while a rollback is made.
ROLLBACK_TRIES = 5
# Faults that one message tells.
MAX_FAULTS = 20
RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class RoutingAdmin:
    """Implements ``gateway.ports.RoutingService``.

    Args:
        book: the revisions.
        audit: who did what.
    """

    book: RoutingProjection
    audit_log: Audit

    def show(self) -> Mapping[str, object]:
        """The revision in force in this process."""
        stored, behind = self.book.in_force, self.book.unusable
        if stored is None:
            raise RuntimeError("there is no routing yet")
        return {
            **_shown(stored),
            "in_force_since": _time(self.book.in_force_since),
            "behind": None if behind is None else {"revision": behind.number, "reason": behind.reason},
        }

    async def apply(self, config: Mapping[str, object], order: RoutingOrder) -> Mapping[str, object]:
        """Make a whole configuration the next revision."""
        return await self._change("apply", "routing", lambda _: config, order)

    async def set_weight(
        self, route: str, backend: str, percent: float, order: RoutingOrder
    ) -> Mapping[str, object]:
        """Give a backend its share of a route."""
        return await self._change(
            "weights",
            f"{route}: {backend} at {percent:g} %",
            lambda last: with_weight(last.draft.config, route, backend, percent),
            order,
        )

    async def promote(self, route: str, backend: str, order: RoutingOrder) -> Mapping[str, object]:
        """Give a backend the whole route."""
        return await self._change(
            "promote",
            f"{route}: {backend}",
            lambda last: with_weight(last.draft.config, route, backend, WHOLE),
            order,
        )

    async def roll_back(self, to: int | None, order: RoutingOrder) -> Mapping[str, object]:
        """Make an earlier configuration the next revision."""
        target = "to the one before" if to is None else f"to revision {to}"
        return await self._audited("rollback", target, order, self._rolled_back(to, order))

    async def history(self, limit: int) -> Sequence[Mapping[str, object]]:
        """The last revisions, newest first."""
        with told(change=False):
            found = await self.book.newest(limit)
        return [_shown(stored) for stored in found]

    async def diff(self, a: int, b: int) -> Sequence[Mapping[str, object]]:
        """What differs from revision ``a`` to ``b``."""
        with told(change=False):
            before, after = await self._revision(a, "a"), await self._revision(b, "b")
        return _changes(before.draft.config, after.draft.config)

    async def audit(self, limit: int) -> Sequence[Mapping[str, object]]:
        """What operators did last, newest first."""
        with told(change=False):
            entries = await self.audit_log.last(limit)
        return [{**entry, "at": _time(entry["at"])} for entry in entries]

    async def _change(
        self,
        action: str,
        target: str,
        make: Callable[[Stored], Mapping[str, object]],
        order: RoutingOrder,
    ) -> Mapping[str, object]:
        return await self._audited(action, target, order, self._made(action, make, order))

    async def _rolled_back(self, to: int | None, order: RoutingOrder) -> Mapping[str, object]:
        for left in reversed(range(ROLLBACK_TRIES)):
            await self.book.expect_last(order.expected)
            head = self.book.head
            source = await (self._other(head) if to is None else self._revision(to, "to"))
            comment = f"rollback to revision {source.number}" + (
                f": {order.comment}" if order.comment else ""
            )
            try:
                return await self._made(
                    "rollback",
                    lambda _, source=source: source.draft.config,  # type: ignore[misc]
                    replace(order, comment=comment, expected=head),
                )
            except Conflict:
                # Somebody else, or another process a moment ago: what is last now is looked at again.
                if order.expected is not None or not left or not await self.book.caught_up_to(head + 1):
                    raise
        raise AssertionError("the last try returns or raises")

    async def _made(
        self, action: str, make: Callable[[Stored], Mapping[str, object]], order: RoutingOrder
    ) -> Mapping[str, object]:
        def decide(last: Stored) -> Draft:
            return Draft(make(last), order.comment, action)

        if order.dry_run:
            await self.book.expect_last(order.expected)
            return self._preview(decide)
        before, stored = await self.book.change(decide, author=order.who, expected=order.expected)
        return {**_shown(stored), "changes": _changes(before.draft.config, stored.draft.config)}

    def _preview(self, decide: Callable[[Stored], Draft]) -> Mapping[str, object]:
        last = self.book.last()
        draft = decide(last)
        self.book.check(draft, "config")
        return {
            "dry_run": True,
            "revision": None,
            "parent": self.book.head,
            "comment": draft.comment,
            "config": draft.config,
            "changes": _changes(last.draft.config, draft.config),
        }

    async def _audited(
        self, action: str, target: str, order: RoutingOrder, doing: Awaitable[Mapping[str, object]]
    ) -> Mapping[str, object]:
        """Translates what it raises, and keeps what came of it; of a dry run nothing."""
        try:
            with told():
                done = await doing
        except GatewayError as error:
            await self._record(action, target, order, f"refused: {error.code}: {error}")
            raise
        await self._record(action, target, order, f"revision {done['revision']}")
        return done

    async def _record(self, action: str, target: str, order: RoutingOrder, result: str) -> None:
        if not order.dry_run:
            await self.audit_log.record(
                order.who, f"routing.{action}", target, comment=order.comment, result=result
            )

    async def _revision(self, number: int, param: str) -> Stored:
        # Not by what has come here: a revision made by another process a moment ago is there too.
        for stored in await self.book.read(number):
            if stored.number == number:
                return stored
        raise InvalidRequest(
            f"{param}: there is no revision {number}; allowed: 1 to {self.book.head}", param=param
        )

    async def _other(self, head: int) -> Stored:
        """The last revision before ``head`` whose content is another one."""
        now, number = self.book.last(), head
        while number > max(head - SEARCHED, 0):
            for stored in await self.book.read(number, PAGE):
                if not same(stored.draft.config, now.draft.config):
                    return stored
            number -= PAGE
        raise InvalidRequest("to: no earlier revision says anything else; name one by its number", param="to")


@contextmanager
def told(*, change: bool = True) -> Iterator[None]:
    """What the routing and the state store raise, as operators are told it, who only look or ``change``."""
    try:
        yield
    except RoutingFileError as error:
        faults = str(error).splitlines()
        more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        raise InvalidRequest("\n".join(faults[:MAX_FAULTS] + more), param="config") from error
    except NoSuchRoute as error:
        raise UnknownRoute(str(error), param="route") from error
    except NothingToShare as error:
        raise InvalidRequest(f"percent: {error}", param="percent") from error
    except Conflict as error:
        raise RevisionConflict(
            f"revision {error.found} is the last one, not {error.expected}; nothing was changed: look at it "
            "and decide again",
            param="expected_revision",
        ) from error
    except RecordTooLarge as error:
        raise InvalidRequest(
            f"config is {error.size} bytes; allowed: {error.allowed}", param="config"
        ) from error
    except StateUnavailable as error:
        doubt = ". Nothing was changed, or not surely: look at the history before you try again"
        raise BackendUnavailable(
            f"{error}; requests are served as before{doubt if change else ''}", retry_after_ms=RETRY_MS
        ) from error
    except (RoutingBusy, NotInForce) as error:
        raise BackendUnavailable(str(error), retry_after_ms=RETRY_MS) from error


def _shown(stored: Stored) -> dict[str, object]:
    return {
        "revision": stored.number,
        "author": stored.author,
        "created_at": _time(stored.at),
        "comment": stored.draft.comment,
        "action": stored.draft.action,
        "parent": stored.parent,
        "config": stored.draft.config,
    }


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[dict[str, object]]:
    return [asdict(change) for change in differences(before, after)]


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
