"""What operators see of the canary and do with it; each order is audited."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime

from gateway.admin.ports import CanaryOrder
from gateway.admin.routing import told
from gateway.errors import GatewayError, InvalidRequest, RevisionConflict
from gateway.routing.canary import CanaryPlan, CanaryState, Phase, end, pause, resume, start, weights_at
from gateway.routing.canary_loop import CanaryDriver
from gateway.routing.canary_records import SAMPLES
from gateway.routing.change import differences, weights_of, with_weights
from gateway.routing.evidence import Evidence
from gateway.routing.projection import RoutingProjection
from gateway.routing.records import Draft
from gateway.state.audit import Audit
from gateway.state.port import StateStore


class CanaryAdmin:
    """Implements ``gateway.ports.CanaryService``.

    Args:
        driver: of this process; an order makes this process the one that drives.
        book: the routing.
        store: where the samples are.
        audit: who did what.
        new_id: a name for a canary.
        unix_time: seconds since 1970.
    """

    def __init__(
        self,
        driver: CanaryDriver,
        book: RoutingProjection,
        store: StateStore,
        audit: Audit,
        *,
        new_id: Callable[[], str],
        unix_time: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._book = book
        self._store = store
        self._audit = audit
        self._new_id = new_id
        self._unix_time = unix_time

    def show(self) -> Mapping[str, object]:
        """The last canary."""
        beat = self._driver.beat
        if beat is None:
            return {"canary": None}
        return {"canary": _shown(beat.standing), "driven_by": beat.holder}

    async def start(self, order: CanaryOrder) -> Mapping[str, object]:
        """Give a backend the first step of a route."""

        async def begin(last: CanaryState | None) -> CanaryState:
            return await self._begin(last, order)

        if order.dry_run:
            with told():
                return self._preview(await begin(self._driver.state))
        return await self._audited(
            "start", f"{order.route}: {order.backend}", order, self._driver.change(begin)
        )

    async def pause(self, who: str, comment: str) -> Mapping[str, object]:
        """Keep its share, judge nothing."""
        return await self._ordered("pause", who, comment, self._pause)

    async def resume(self, who: str, comment: str) -> Mapping[str, object]:
        """Judge again."""
        return await self._ordered("resume", who, comment, self._resume)

    async def abort(self, who: str, comment: str, *, dry_run: bool = False) -> Mapping[str, object]:
        """End it, with the route's weights as before."""
        if dry_run:
            with told():
                return self._preview(await self._abort(self._standing("abort"), comment))
        return await self._ordered("abort", who, comment, self._abort)

    async def _begin(self, now: CanaryState | None, order: CanaryOrder) -> CanaryState:
        if now is not None and (not now.ended or not now.applied):
            raise RevisionConflict(
                f"a canary of {now.plan.backend!r} on {now.plan.route!r} is {now.phase.value}; "
                "abort it, or wait for its end"
            )
        last = self._book.last()
        before = weights_of(last.draft.config, order.route)
        has = before.get(order.backend, 0.0)
        if has >= order.steps[0]:
            raise InvalidRequest(
                f"steps: {order.backend!r} has {has:g} % of the route; allowed: a first step above that",
                param="steps",
            )
        plan = CanaryPlan(
            self._new_id(),
            order.route,
            order.backend,
            before,
            order.who,
            order.comment,
            order.steps,
            order.min_samples,
            order.step_s,
            order.window_s,
        )
        first = with_weights(last.draft.config, order.route, weights_at(plan, order.steps[0]))
        self._book.check(Draft(first, "", "canary"), "config")
        read_to = (await self._store.heads()).get(SAMPLES, 0)
        return start(plan, read_to=read_to, now=self._unix_time())

    def _standing(self, action: str) -> CanaryState:
        standing = self._driver.state
        if standing is None:
            raise RevisionConflict(f"there is no canary to {action}")
        return standing

    def _preview(self, standing: CanaryState) -> Mapping[str, object]:
        """What it would be, and what of the routing would change; a dry run is not audited."""
        now = self._book.last().draft.config
        then = with_weights(now, standing.plan.route, standing.wanted)
        changes = [asdict(change) for change in differences(now, then)]
        return {"dry_run": True, "canary": _shown(standing), "changes": changes}

    async def _pause(self, standing: CanaryState, comment: str) -> CanaryState:
        if standing.phase is not Phase.RUNNING:
            raise _not_so(standing, "a running one")
        return pause(standing, comment)

    async def _resume(self, standing: CanaryState, _: str) -> CanaryState:
        if standing.phase is not Phase.PAUSED:
            raise _not_so(standing, "a paused one")
        read_to = (await self._store.heads()).get(SAMPLES, 0)
        return resume(standing, read_to=read_to, now=self._unix_time())

    async def _abort(self, standing: CanaryState, comment: str) -> CanaryState:
        if standing.ended:
            raise _not_so(standing, "a running or paused one")
        return end(standing, Phase.ABORTED, comment or "by an operator", self._unix_time())

    async def _ordered(
        self,
        action: str,
        who: str,
        comment: str,
        make: Callable[[CanaryState, str], Awaitable[CanaryState]],
    ) -> Mapping[str, object]:
        standing = self._standing(action)
        target = f"{standing.plan.route}: {standing.plan.backend}"

        async def made(last: CanaryState | None) -> CanaryState:
            return await make(standing if last is None else last, comment)

        order = CanaryOrder(who, standing.plan.route, standing.plan.backend, comment)
        return await self._audited(action, target, order, self._driver.change(made))

    async def _audited(
        self, action: str, target: str, order: CanaryOrder, doing: Awaitable[None]
    ) -> Mapping[str, object]:
        try:
            with told():
                await doing
        except GatewayError as error:
            result = f"refused: {error.code}: {error}"
            await self._audit.record(
                order.who, f"canary.{action}", target, comment=order.comment, result=result
            )
            raise
        await self._audit.record(order.who, f"canary.{action}", target, comment=order.comment)
        # Brought about now, by this process; when the store goes away in between, by the next tick of any.
        await self._driver.tick()
        return self.show()


def _not_so(standing: CanaryState, allowed: str) -> RevisionConflict:
    return RevisionConflict(f"the canary is {standing.phase.value}; allowed: {allowed}")


def _shown(standing: CanaryState) -> dict[str, object]:
    plan = standing.plan
    return {
        "id": plan.id,
        "route": plan.route,
        "backend": plan.backend,
        "phase": standing.phase.value,
        "percent": standing.wanted.get(plan.backend, 0.0) if standing.applied else None,
        "step": standing.step + 1,
        "steps": list(plan.steps),
        "since": datetime.fromtimestamp(standing.since, UTC).isoformat(timespec="milliseconds"),
        "reason": standing.reason,
        "author": plan.author,
        "comment": plan.comment,
        "min_samples": plan.min_samples,
        "step_seconds": plan.step_s,
        "window_seconds": plan.window_s,
        "alpha": plan.alpha,
        "tolerance": plan.tolerance,
        "canary_requests": standing.canary_requests,
        "waiting_for": None if standing.ended else _waiting(standing),
        "checks": {
            check: {
                **asdict(counts),
                "log10_e": round(standing.evidence.get(check, Evidence()).log_e / math.log(10), 2),
                "log10_bound": round(plan.bound / math.log(10), 2),
            }
            for check, counts in standing.counts.items()
        },
    }


def _waiting(standing: CanaryState) -> str:
    if standing.phase is Phase.PAUSED:
        return "an operator"
    requests = standing.counts.get("error")
    least = 0 if requests is None else min(requests.canary, requests.baseline)
    if least < standing.plan.min_samples:
        return f"requests: {least} of {standing.plan.min_samples} on the side that has fewer"
    return "time, or clearer figures"
