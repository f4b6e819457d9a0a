"""The canary for operators: start, pause, resume, abort; each command is audited."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, NotRequired

from pydantic import Field, field_validator
from typing_extensions import TypedDict

from adapters.changes import NotEvaluatedError
from gateway.contracts.fields import Body, from_attributes
from gateway.contracts.times import iso_time
from gateway.errors import InvalidRequest, RevisionConflict
from gateway.routing import canary
from gateway.routing.canary_loop import CanaryDriver
from gateway.routing.canary_records import SAMPLES
from gateway.routing.change import WHOLE, ConfigChange, differences, weights_of, with_weights
from gateway.routing.evidence import Evidence
from gateway.routing.projection import RoutingProjection
from gateway.routing.records import Draft
from gateway.routing.refusals import operator_errors
from gateway.shadow.statistics import wilson
from gateway.state.audit import Audit
from gateway.state.port import StateStore


class CanaryBody(Body):
    """The reason of a command; stored in the audit log."""

    comment: Annotated[str, Field(max_length=1_000)] = ""


class CanaryAbortBody(CanaryBody):
    """The reason of a command; a dry run changes nothing and shows what would change."""

    dry_run: bool = False


class CanaryStartBody(CanaryAbortBody):
    """A backend that gets a route step by step."""

    route: str
    backend: str
    steps: Annotated[tuple[Annotated[float, Field(gt=0, le=WHOLE)], ...], Field(max_length=20)] = canary.STEPS
    min_samples: Annotated[int, Field(ge=1, le=1_000_000)] = canary.MIN_SAMPLES
    step_seconds: Annotated[float, Field(ge=0, le=43_200)] = canary.STEP_S
    window_seconds: Annotated[float, Field(ge=1, le=60)] = canary.WINDOW_S
    force: bool = False
    """Start without an evaluation on a route that requires one."""

    @field_validator("steps")
    @classmethod
    def _rising(cls, steps: tuple[float, ...]) -> tuple[float, ...]:
        if len(steps) < 2 or steps[-1] != WHOLE or list(steps) != sorted(set(steps)):
            raise ValueError("allowed: at least two rising percents, the last of them 100")
        return steps


class CanaryCheck(TypedDict):
    """One check's figures in this step; the canary is rolled back if ``log10_e`` reaches ``log10_bound``.

    The intervals are 95 % intervals of the shares of bad requests; ``None`` without a request.
    """

    canary_bad: int
    canary: int
    canary_interval: tuple[float, float] | None
    baseline_bad: int
    baseline: int
    baseline_interval: tuple[float, float] | None
    log10_e: float
    log10_bound: float


class CanaryStatus(TypedDict):
    """The plan and the state of a canary."""

    id: str
    route: str
    backend: str
    phase: str
    percent: float | None
    step: int
    steps: list[float]
    since: str
    reason: str
    author: str
    comment: str
    min_samples: int
    step_seconds: float
    window_seconds: float
    alpha: float
    tolerance: float
    canary_requests: int
    waiting_for: str | None
    checks: dict[str, CanaryCheck]


class CanaryShownBody(TypedDict):
    """The last canary, and which process drives it."""

    canary: CanaryStatus | None
    driven_by: NotRequired[str]
    dry_run: NotRequired[bool]
    changes: NotRequired[list[ConfigChange]]


Made = Awaitable[canary.CanaryState]


@dataclass(frozen=True, slots=True)
class CanaryAdmin:
    """Commands for the canary; there is one canary at a time. ``who`` is the key's id.

    Commands raise InvalidRequest, UnknownRoute, RevisionConflict (the canary's phase does not allow the
    command, or another command came first) and BackendUnavailable (the state store is unreachable).

    Args:
        driver: the driver of this process; after a command this process drives the canary.
        store: the store of the samples.
        evaluation_fault: returns why a backend has no valid evaluation; ``None`` if it passed one.
        guardrails: the names of the content checks.
    """

    driver: CanaryDriver
    routing: RoutingProjection
    store: StateStore
    audit: Audit
    _: KW_ONLY
    new_id: Callable[[], str]
    unix_time: Callable[[], float]
    evaluation_fault: Callable[[str], str | None]
    guardrails: tuple[str, ...] = ()

    def show(self) -> CanaryShownBody:
        lease = self.driver.lease
        if lease is None:
            return {"canary": None}
        return {"canary": _shown(lease.state), "driven_by": lease.holder}

    async def start(self, given: CanaryStartBody, *, who: str) -> CanaryShownBody:
        if given.dry_run:
            return await self._preview(self._begin(self.driver.state, given, who))
        action, target = "start.forced" if given.force else "start", f"{given.route}: {given.backend}"
        return await self._audited(action, target, given, who, lambda last: self._begin(last, given, who))

    async def pause(self, given: CanaryBody, *, who: str) -> CanaryShownBody:
        return await self._ordered("pause", given, who, self._pause)

    async def resume(self, given: CanaryBody, *, who: str) -> CanaryShownBody:
        return await self._ordered("resume", given, who, self._resume)

    async def abort(self, given: CanaryAbortBody, *, who: str) -> CanaryShownBody:
        if given.dry_run:
            return await self._preview(self._abort(self._current("abort"), given.comment))
        return await self._ordered("abort", given, who, self._abort)

    async def _begin(
        self, now: canary.CanaryState | None, given: CanaryStartBody, who: str
    ) -> canary.CanaryState:
        if now is not None and (not now.ended or not now.applied):
            advice = (
                "its last change is not recorded yet, try again"
                if now.ended
                else "abort it, or wait for its end"
            )
            raise RevisionConflict(
                f"a canary of {now.plan.backend!r} on {now.plan.route!r} is {now.phase.value}; {advice}"
            )
        last = self.routing.last()
        before = weights_of(last.draft.config, given.route)
        self.routing.check_backend(given.backend)
        required = last.draft.config["routes"][given.route].get("requires_evaluation", False)
        if required and not given.force and (fault := self.evaluation_fault(given.backend)) is not None:
            raise NotEvaluatedError(f"{fault}; run `sluice evaluate variant --post`, or force it as an admin")
        has = before.get(given.backend, 0.0)
        if has >= given.steps[0]:
            raise InvalidRequest(
                f"steps: {given.backend!r} has {has:g} % of the route; allowed: a first step above that",
                param="steps",
            )
        route, backend, comment = given.route, given.backend, given.comment
        bounds = (given.steps, given.min_samples, given.step_seconds, given.window_seconds)
        plan = canary.CanaryPlan(
            self.new_id(), route, backend, before, who, comment, *bounds, guardrails=self.guardrails
        )
        first = with_weights(last.draft.config, given.route, canary.weights_at(plan, given.steps[0]))
        await self.routing.check(Draft(first, "", "canary"))
        read_to = (await self.store.heads()).get(SAMPLES, 0)
        return canary.start(plan, read_to=read_to, now=self.unix_time())

    def _current(self, action: str) -> canary.CanaryState:
        state = self.driver.state
        if state is None:
            raise RevisionConflict(f"there is no canary to {action}")
        return state

    async def _preview(self, made: Made) -> CanaryShownBody:
        """Return the canary and the routing's changes as they would be; a dry run is not audited."""
        with operator_errors():
            state, now = await made, self.routing.last().draft.config
            then = with_weights(now, state.plan.route, state.wanted)
            return {"dry_run": True, "canary": _shown(state), "changes": differences(now, then)}

    async def _pause(self, state: canary.CanaryState, comment: str) -> canary.CanaryState:
        if state.phase is not canary.Phase.RUNNING:
            raise _wrong_phase(state, "a running one")
        return canary.pause(state, comment)

    async def _resume(self, state: canary.CanaryState, _: str) -> canary.CanaryState:
        if state.phase is not canary.Phase.PAUSED:
            raise _wrong_phase(state, "a paused one")
        read_to = (await self.store.heads()).get(SAMPLES, 0)
        return canary.resume(state, read_to=read_to, now=self.unix_time())

    async def _abort(self, state: canary.CanaryState, comment: str) -> canary.CanaryState:
        if state.ended:
            raise _wrong_phase(state, "a running or paused one")
        return canary.end(state, canary.Phase.ABORTED, comment or "by an operator", self.unix_time())

    async def _ordered(
        self, action: str, given: CanaryBody, who: str, step: Callable[[canary.CanaryState, str], Made]
    ) -> CanaryShownBody:
        state = self._current(action)
        target = f"{state.plan.route}: {state.plan.backend}"
        return await self._audited(
            action, target, given, who, lambda last: step(last or state, given.comment)
        )

    async def _audited(
        self,
        action: str,
        target: str,
        given: CanaryBody,
        who: str,
        make: Callable[[canary.CanaryState | None], Made],
    ) -> CanaryShownBody:
        async with self.audit.attempt(who, f"canary.{action}", target, comment=given.comment):
            with operator_errors():
                await self.driver.change(make)
        # This process executes the command now; if the store fails here, the next tick of any process does.
        await self.driver.tick()
        return self.show()


def _wrong_phase(state: canary.CanaryState, allowed: str) -> RevisionConflict:
    return RevisionConflict(f"the canary is {state.phase.value}; allowed: {allowed}")


def _shown(state: canary.CanaryState) -> CanaryStatus:
    plan = state.plan
    return from_attributes(
        CanaryStatus,
        plan,
        phase=state.phase.value,
        percent=state.wanted.get(plan.backend, 0.0) if state.applied else None,
        step=state.step + 1,
        steps=list(plan.steps),
        since=iso_time(state.since, "milliseconds"),
        reason=state.reason,
        step_seconds=plan.step_s,
        window_seconds=plan.window_s,
        canary_requests=state.canary_requests,
        waiting_for=None if state.ended else _waiting(state),
        checks={
            check: from_attributes(
                CanaryCheck,
                counts,
                canary_interval=_interval(counts.canary_bad, counts.canary),
                baseline_interval=_interval(counts.baseline_bad, counts.baseline),
                log10_e=round(state.evidence.get(check, Evidence()).log_e / math.log(10), 2),
                log10_bound=round(plan.bound / math.log(10), 2),
            )
            for check, counts in state.counts.items()
        },
    )


def _interval(bad: int, requests: int) -> tuple[float, float] | None:
    if not requests:
        return None
    found = wilson(bad, requests)
    return found.low or 0.0, found.high or 0.0


def _waiting(state: canary.CanaryState) -> str:
    if state.phase is canary.Phase.PAUSED:
        return "an operator"
    requests = state.counts.get("error")
    least = 0 if requests is None else min(requests.canary, requests.baseline)
    if least < state.plan.min_samples:
        return (
            f"requests: {least} of {state.plan.min_samples} on the side that has fewer, "
            f"in windows of {state.plan.window_s:g} s that have both"
        )
    return "time, or clearer figures"
