"""Decides when a canary gets more traffic and when it is rolled back; no I/O.

The next step begins when the current one is old enough, both sides have enough requests, and no check is
suspicious. The canary is rolled back as soon as one check's e-value (:mod:`gateway.routing.evidence`)
reaches its bound, at any number of requests. Each check of each step has an equal part of ``alpha``. So a
canary whose odds of a fault in every check are at most ``tolerance`` times the baseline's is rolled back
with a probability of at most ``alpha``, if its requests fail independently of each other.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gateway.routing.change import WHOLE, shifted
from gateway.routing.evidence import Evidence, EvidenceWindow

CHECKS = ("error", "ttft", "total", "fallback", "guardrail")
"""The compared shares of requests: those that failed, whose first token or whole answer was late, that
another backend than the drawn one answered, or whose answer failed a content check (``guardrail.NAME``)."""
STEPS = (5.0, 25.0, 50.0, 100.0)
ALPHA = 0.01
TOLERANCE = 1.25
"""A canary at 1.25 times the odds of a fault is accepted: 1.25 % against 1.0 %, 24 % against 20 %."""
MIN_SAMPLES = 200
STEP_S = 60.0
WINDOW_S = 5.0
SUSPICIOUS = 10.0
"""The e-value from which the next step waits; at most one in ten checks of a good canary reaches it."""
LIFE_S = 86_400.0
"""Longest duration since the start or the last resumption; it bounds the growth of the streams."""

Counts = Mapping[str, EvidenceWindow]


class Phase(StrEnum):
    """The phase of a canary; stable codes."""

    RUNNING = "running"
    PAUSED = "paused"
    """The canary's share stays, and no evidence is evaluated."""
    DONE = "done"
    """The canary has the whole route."""
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"
    """An operator ended the canary; the route is as before."""
    OVERRIDDEN = "overridden"
    """Another change set the route's weights; the canary left them as they are."""


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """The plan of a canary.

    Args:
        before: the route's weights at the start, which a rollback restores.
        steps: rising percents; the last is 100.
        min_samples: requests that each side needs in a step, in windows in which both sides have some.
        step_s: shortest time of a step.
        window_s: length of a window; requests of the same window are compared with each other.
        alpha: highest probability that a good canary is rolled back.
        tolerance: the tolerated odds ratio of faults.
        guardrails: names of the checks of answers' content.
    """

    id: str
    route: str
    backend: str
    before: Mapping[str, float]
    author: str
    comment: str = ""
    steps: tuple[float, ...] = STEPS
    min_samples: int = MIN_SAMPLES
    step_s: float = STEP_S
    window_s: float = WINDOW_S
    alpha: float = ALPHA
    tolerance: float = TOLERANCE
    guardrails: tuple[str, ...] = ()

    @property
    def bound(self) -> float:
        """The logarithm of the e-value at which one check of one step ends the canary."""
        checks = len(CHECKS) - 1 + max(1, len(self.guardrails))
        return math.log(checks * max(1, len(self.steps) - 1) / self.alpha)


@dataclass(frozen=True, slots=True)
class CanaryState:
    """The state of a canary; it is all that another process needs to drive the canary.

    Args:
        since: when the step came into force, or the phase began; seconds since 1970.
        deadline: when the canary must have ended; seconds since 1970.
        placed: the route's weights as the canary last set them; once it is overridden, as found then.
        applied: whether the routing has the weights ``wanted``.
        revision: the routing revision that had them.
        read_to: the number of the last counted sample record.
        counts: the counts of the step by check, of windows in which both sides have requests.
        evidence: the evidence of the step, by check.
        reason: why the canary is not running.
    """

    plan: CanaryPlan
    phase: Phase
    since: float
    deadline: float
    placed: Mapping[str, float]
    step: int = 0
    applied: bool = False
    revision: int = 0
    read_to: int = 0
    counts: Mapping[str, EvidenceWindow] = field(default_factory=dict)
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    canary_requests: int = 0
    reason: str = ""

    @property
    def ended(self) -> bool:
        return self.phase not in (Phase.RUNNING, Phase.PAUSED)

    @property
    def needs_driver(self) -> bool:
        return not self.ended or not self.applied

    @property
    def wanted(self) -> Mapping[str, float]:
        if self.phase is Phase.OVERRIDDEN:
            return self.placed
        if self.phase in (Phase.ROLLED_BACK, Phase.ABORTED):
            return {self.plan.backend: 0.0, **self.plan.before}
        return weights_at(self.plan, self.plan.steps[self.step])


def start(plan: CanaryPlan, *, read_to: int, now: float) -> CanaryState:
    """Return the state of the first step, which is not in force yet."""
    return CanaryState(plan, Phase.RUNNING, now, now + LIFE_S, plan.before, read_to=read_to)


def weights_at(plan: CanaryPlan, percent: float) -> Mapping[str, float]:
    """Return the route's weights with ``percent`` on the canary; the other backends keep their ratio."""
    return shifted(plan.route, plan.before, plan.backend, percent)


def in_force(state: CanaryState, now: float, revision: int = 0) -> CanaryState:
    """Return the state once the routing has the wanted weights; the time of the step begins."""
    return replace(state, applied=True, placed=state.wanted, since=now, revision=revision)


def end(state: CanaryState, phase: Phase, reason: str, now: float) -> CanaryState:
    """Return the ended state; the driver still has to restore the routing."""
    return replace(state, phase=phase, reason=reason, since=now, applied=phase is Phase.OVERRIDDEN)


def pause(state: CanaryState, reason: str) -> CanaryState:
    return replace(state, phase=Phase.PAUSED, reason=reason)


def resume(state: CanaryState, *, read_to: int, now: float) -> CanaryState:
    """Return the running state again; the evidence from before the pause still counts."""
    return replace(state, phase=Phase.RUNNING, reason="", read_to=read_to, deadline=now + LIFE_S)


def judge(state: CanaryState, windows: Iterable[Counts], *, read_to: int, now: float) -> CanaryState:
    """Return the state after further ``windows``, oldest first."""
    plan, since = state.plan, min(state.since, now)  # the clock may have been set back
    counts, evidence, seen = dict(state.counts), dict(state.evidence), state.canary_requests
    for window in windows:
        for check, one in window.items():
            if not one.has_both:
                continue  # nothing to compare; if it counted, a canary that always fails could go on
            counts[check] = counts.get(check, EvidenceWindow()) + one
            evidence[check] = evidence.get(check, Evidence()).seen(one, plan.tolerance)
        seen += window.get("error", EvidenceWindow()).canary
    state = replace(
        state, since=since, counts=counts, evidence=evidence, canary_requests=seen, read_to=read_to
    )
    worst = max(evidence, key=lambda check: evidence[check].log_e, default=None)
    if worst is not None and evidence[worst].log_e >= plan.bound:
        return end(state, Phase.ROLLED_BACK, _why(state, worst), now)
    if now >= state.deadline:
        return end(state, Phase.ROLLED_BACK, "it came to no end within a day", now)
    requests = counts.get("error", EvidenceWindow())
    if (
        now - since < plan.step_s
        or min(requests.canary, requests.baseline) < plan.min_samples
        or any(one.log_e >= math.log(SUSPICIOUS) for one in evidence.values())
    ):
        return state
    step = state.step + 1
    last = plan.steps[step] >= WHOLE
    return replace(
        state,
        step=step,
        phase=Phase.DONE if last else Phase.RUNNING,
        since=now,
        applied=False,
        counts={} if not last else counts,
        evidence={} if not last else evidence,
    )


def _why(state: CanaryState, check: str) -> str:
    seen = state.counts[check]
    return (
        f"{check}: {seen.canary_bad} of {seen.canary} requests "
        f"against {seen.baseline_bad} of {seen.baseline} in the same windows "
        f"at {state.plan.steps[state.step]:g} % "
        f"(e-value {_power(state.evidence[check].log_e)}, bound {_power(state.plan.bound)}; "
        f"after {state.canary_requests} requests on the canary)"
    )


def _power(log: float) -> str:
    """Format an e-value from its logarithm, without overflow."""
    return f"{math.exp(log):.0f}" if log < 10 else f"1e{log / math.log(10):.0f}"
