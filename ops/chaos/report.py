"""The result of a run: the outcome of each request, the injected faults, the gateway's figures, problems."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import dropwhile, takewhile
from typing import Any

from ops.chaos.figures import Holdings
from ops.chaos.request_outcome import AppliedFault, RequestOutcome
from ops.chaos.scenario import Scenario, Verdict

# Threads and descriptors that pools may keep: asyncio's threads, idle connections, SQLite's. A leak grows
# with the requests and soon exceeds this.
KEPT_BY_POOLS = 16
KEPT_BY_BEDROCK = 32  # Bedrock's client keeps as many threads and connections as calls were in flight
# Results of ``unready`` that are about backends.
ENGINE_CHECKS = frozenset({"engine", "model_loaded", "workers_ready", "no answer"})


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """Seconds from an action until ``/ready`` failed, until the backends were back, and until it was ready.

    ``checks`` are the checks that failed in between.
    """

    down_s: float | None
    back_s: float | None
    ready_s: float | None
    checks: frozenset[str]


@dataclass(slots=True)
class ChaosReport:
    """A whole run. Times are seconds since the load began.

    Args:
        readiness: times of changes of ``/ready``, with the checks that failed from then on.
        reported: growth of the gateway's counters.
        before, after: resources of the gateway's process; ``None`` when it is not on this machine.
        at_rest: whether nothing was in flight at the end; ``None`` when it is not known.
        never_done: scripted actions that would have broken a process, due only after the load's end.
    """

    scenario: Scenario
    wall_s: float = 0.0
    outcomes: list[RequestOutcome] = field(default_factory=list)
    injected: list[AppliedFault] = field(default_factory=list)
    readiness: list[tuple[float, frozenset[str]]] = field(default_factory=list)
    reported: Mapping[str, float] = field(default_factory=dict)
    before: Holdings | None = None
    after: Holdings | None = None
    at_rest: bool | None = None
    never_done: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def verdicts(self) -> dict[Verdict, int]:
        """The number of requests per verdict, in the order of :class:`Verdict`."""
        counts = Counter(outcome.verdict for outcome in self.outcomes)
        return {verdict: counts[verdict] for verdict in Verdict if counts[verdict]}

    @property
    def ok(self) -> bool:
        return not self.problems

    def judge(self, ready: bool) -> None:
        """Collect the problems; called when all results are known. ``ready``: the gateway is ready again."""
        allowed = set(self.scenario.allow)
        for verdict, count in self.verdicts.items():
            if verdict not in allowed:
                reasons = Counter(one.why for one in self.outcomes if one.verdict is verdict)
                why = reasons.most_common(1)[0][0]
                self.problems.append(f"{count} × {verdict}{f' ({why})' if why else ''}")
        if not ready:
            self.problems.append(f"not ready again within {self.scenario.settle_s:g} s")
        if self.at_rest is False:
            self.problems.append("a request is still in flight in the gateway")
        self.problems.extend(self._leaks())
        self.problems.extend(f"{label}: the load was over before its time" for label in self.never_done)
        if self.scenario.random is None:
            met = {label for outcome in self.outcomes for label in outcome.met}
            idle = {one.label for one in self.injected if one.breaks is not None} - met
            self.problems.extend(
                f"{label}: no request was under way, so nothing is shown" for label in sorted(idle)
            )

    def recoveries(self) -> Mapping[AppliedFault, RecoveryTimes]:
        """Recovery times after each action that broke a process."""
        found = {}
        for one in self.injected:
            if one.breaks is None:
                continue
            later = [(at_s - one.at_s, failing) for at_s, failing in self.readiness if at_s >= one.at_s]
            outage = list(dropwhile(lambda change: not change[1], later))
            down = list(takewhile(lambda change: change[1], outage))
            found[one] = RecoveryTimes(
                down_s=next((after for after, _ in down), None),
                back_s=next((after for after, failing in outage if not failing & ENGINE_CHECKS), None),
                ready_s=next((after for after, _ in outage[len(down) :]), None),
                checks=frozenset[str]().union(*(failing for _, failing in down)),
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "about": self.scenario.about,
            "ok": self.ok,
            "problems": self.problems,
            "wall_s": round(self.wall_s, 3),
            "verdicts": self.verdicts,
            "faults": [asdict(one) for one in self.injected],
            "readiness": [
                {"at_s": round(at_s, 3), "failing": sorted(failing)} for at_s, failing in self.readiness
            ],
            "metrics": dict(self.reported),
            "before": None if self.before is None else asdict(self.before),
            "after": None if self.after is None else asdict(self.after),
            "at_rest": self.at_rest,
            "requests": [asdict(outcome) for outcome in self.outcomes],
        }

    def _leaks(self) -> list[str]:
        before, after, start = self.before, self.after, self.scenario.start
        if before is None or after is None:
            return []
        load = self.scenario.load
        room = KEPT_BY_POOLS
        if start.bedrock:
            room += KEPT_BY_BEDROCK
        if start.workers:
            room += load.streams + load.whole
        reported = []
        for name in ("threads", "descriptors"):
            was, now = getattr(before, name), getattr(after, name)
            if now > was + room:
                reported.append(f"{name} grew from {was} to {now}; pools explain {room}")
        return reported
