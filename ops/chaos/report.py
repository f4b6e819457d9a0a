"""A run's result: every request's fate, what was done, what the gateway told, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ops.chaos.figures import Holdings
from ops.chaos.request_fate import Happened, RequestFate
from ops.chaos.scenario import FateVerdict, Scenario

# Threads and descriptors that pools may keep beyond what there was before: asyncio's own threads, idle
# connections, SQLite's. What leaks grows with the requests and is soon above it.
KEPT_BY_POOLS = 16
# Bedrock's threads and connections, and those to workers, are as many as calls were under way at once.
KEPT_BY_BEDROCK = 32


# Checks of `/ready` that tell of what generates.
ENGINE_CHECKS = frozenset({"engine", "model_loaded", "workers_ready", "no answer"})


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """Seconds after a deed: until ``/ready`` told, until what generates was back, until it was ready.

    ``checks`` are those that failed in between.
    """

    down_s: float | None
    back_s: float | None
    ready_s: float | None
    checks: frozenset[str]


@dataclass(slots=True)
class ChaosReport:
    """A whole run. Times are seconds since the load began.

    Args:
        readiness: when what ``/ready`` tells changed, and the checks that failed from then on.
        told: what the gateway's counters grew by.
        before, after: what the gateway's process held; ``None`` when it is not on this machine.
        at_rest: whether nothing was under way at the end; ``None`` when it could not be asked.
        never_done: scripted deeds that would have broken a process; the load was over before their time.
        problems: why the run has failed; empty when it has not.
    """

    scenario: Scenario
    wall_s: float = 0.0
    fates: list[RequestFate] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)
    readiness: list[tuple[float, frozenset[str]]] = field(default_factory=list)
    reported: Mapping[str, float] = field(default_factory=dict)
    before: Holdings | None = None
    after: Holdings | None = None
    at_rest: bool | None = None
    never_done: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def verdicts(self) -> dict[FateVerdict, int]:
        """How many requests had which verdict, in the order of the verdicts."""
        counts = Counter(fate.verdict for fate in self.fates)
        return {verdict: counts[verdict] for verdict in FateVerdict if counts[verdict]}

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def judge(self, ready: bool) -> None:
        """Look for what is wrong, once everything is known."""
        allowed = set(self.scenario.allow)
        for verdict, count in self.verdicts.items():
            if verdict not in allowed:
                why = Counter(fate.why for fate in self.fates if fate.verdict is verdict).most_common(1)[0][0]
                self.problems.append(f"{count} × {verdict}{f' ({why})' if why else ''}")
        if not ready:
            self.problems.append(f"not ready again within {self.scenario.settle_s:g} s")
        if self.at_rest is False:
            self.problems.append("something is still under way in the gateway")
        self.problems.extend(self._kept())
        self.problems.extend(f"{label}: the load was over before its time" for label in self.never_done)
        if self.scenario.random is None:
            met = {label for fate in self.fates for label in fate.met}
            idle = {one.label for one in self.happened if one.breaks is not None} - met
            self.problems.extend(
                f"{label}: no request was under way, so nothing is shown" for label in sorted(idle)
            )

    def recoveries(self) -> Mapping[Happened, RecoveryTimes]:
        """How ``/ready`` took each deed that broke a process."""
        found = {}
        for one in self.happened:
            if one.breaks is None:
                continue
            later = [(at_s - one.at_s, failing) for at_s, failing in self.readiness if at_s >= one.at_s]
            down = next((after for after, failing in later if failing), None)
            if down is None:
                found[one] = RecoveryTimes(None, None, None, frozenset())
                continue
            later = [(after, failing) for after, failing in later if after >= down]
            up = next((number for number, (_, failing) in enumerate(later) if not failing), len(later))
            back = next((after for after, failing in later if not failing & ENGINE_CHECKS), None)
            checks = frozenset[str]().union(*(failing for _, failing in later[:up]))
            found[one] = RecoveryTimes(down, back, later[up][0] if up < len(later) else None, checks)
        return found

    def as_json(self) -> dict[str, Any]:
        """All of it, for machines."""
        return {
            "about": self.scenario.about,
            "ok": self.ok,
            "problems": self.problems,
            "wall_s": round(self.wall_s, 3),
            "verdicts": {verdict.value: count for verdict, count in self.verdicts.items()},
            "faults": [asdict(one) for one in self.happened],
            "readiness": [
                {"at_s": round(at_s, 3), "failing": sorted(failing)} for at_s, failing in self.readiness
            ],
            "metrics": dict(self.reported),
            "before": None if self.before is None else asdict(self.before),
            "after": None if self.after is None else asdict(self.after),
            "at_rest": self.at_rest,
            "requests": [asdict(fate) for fate in self.fates],
        }

    def _kept(self) -> list[str]:
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
