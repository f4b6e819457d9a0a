"""How often a good canary is rolled back, and after how many requests a bad one is; on a simulated clock.

    python -m benchmarks.canary_guard
    python -m benchmarks.canary_guard --good 1000 --rate 20

Each canary is judged window by window as ``gateway.routing.canary`` judges real ones, by requests drawn at
random. Good canaries are as bad as the baseline, or exactly as much worse as is tolerated, which is the
hardest case. The baseline's own faults rise and fall over time. Nothing waits in real time: a canary of
minutes takes milliseconds.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gateway.routing.canary import (
    ALPHA,
    CHECKS,
    LIFE_S,
    TOLERANCE,
    CanaryPlan,
    CanaryState,
    Phase,
    in_force,
    judge,
    start,
)
from gateway.routing.evidence import EvidenceWindow

# The baseline's shares of bad requests, by check: a normal service whose targets are missed now and then.
BASELINE = {"error": 0.01, "ttft": 0.05, "total": 0.03, "fallback": 0.02, "guardrail": 0.01}
# Over time, every share becomes up to this many times larger, on both sides.
SWING = 4.0
SWING_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of canary: its shares of bad requests as a function of the baseline's at that moment.

    Args:
        good: whether rolling it back is an error.
        after_s: seconds for which it is as good as the baseline.
    """

    name: str
    good: bool
    share: Callable[[str, float], float]
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a case, over all runs; requests: the canary's, between fault and rollback."""

    case: str
    good: bool
    runs: int
    rolled_back: int
    done: int
    requests_median: float | None
    requests_p95: float | None
    requests_most: int | None
    seconds_median: float


def times_odds(share: float, ratio: float) -> float:
    """Return the share whose odds are ``ratio`` times the odds of ``share``."""
    return ratio * share / (1 - share + ratio * share)


def only(check: str, share: Callable[[float], float]) -> Callable[[str, float], float]:
    """Return a function that changes the share of one check alone."""
    return lambda name, base: share(base) if name == check else base


CASES = (
    Case("as the baseline", True, lambda _, base: base),
    Case("as bad as is tolerated, in every check", True, lambda _, base: times_odds(base, TOLERANCE)),
    Case("every request fails", False, only("error", lambda _: 1.0)),
    Case("one request in ten fails", False, only("error", lambda _: 0.1)),
    Case("first tokens late: 3 times as often", False, only("ttft", lambda base: min(1.0, 3 * base))),
    Case("answers late: every second", False, only("total", lambda _: 0.5)),
    Case("off the format: one answer in five", False, only("guardrail", lambda _: 0.2)),
    Case("off the format: every answer", False, only("guardrail", lambda _: 1.0)),
    Case("every request fails, from the 50th second on", False, only("error", lambda _: 1.0), 50.0),
)


def run(case: Case, rate: float, draw: random.Random) -> tuple[CanaryState, int, float]:
    """Run one canary to its end: its state, the canary's requests since the fault, and its seconds."""
    plan = CanaryPlan("c1", "chat", "new", {"old": 100.0}, "benchmark")
    now, faulty = 0.0, 0
    standing = in_force(start(plan, read_to=0, now=now), now)
    phase = draw.random() * SWING_S
    while standing.phase is Phase.RUNNING and now < LIFE_S:
        percent = plan.steps[standing.step]
        bad_now = now >= case.after_s
        swing = 1 + (SWING - 1) * (1 + math.sin(2 * math.pi * (now + phase) / SWING_S)) / 2
        sides = [0, 0]
        for _ in range(_poisson(rate * plan.window_s, draw)):
            sides[draw.random() * 100 < percent] += 1
        baseline, canary = sides
        faulty += canary if bad_now else 0
        window: dict[str, EvidenceWindow] = {}
        for check in CHECKS:
            base = min(0.5, BASELINE[check] * swing)
            share = case.share(check, base) if bad_now else base
            window[check] = EvidenceWindow(
                _binomial(canary, share, draw), canary, _binomial(baseline, base, draw), baseline
            )
        now += plan.window_s
        standing = judge(standing, [window], read_to=0, now=now)
        if standing.phase is Phase.RUNNING and not standing.applied:
            standing = in_force(standing, now)
    return standing, faulty, now


def measure(case: Case, runs: int, rate: float, seed: int) -> Result:
    """Run many canaries of one kind."""
    draw = random.Random(f"{seed} {case.name}")
    found = [run(case, rate, draw) for _ in range(runs)]
    back = sorted(faulty for standing, faulty, _ in found if standing.phase is Phase.ROLLED_BACK)
    return Result(
        case=case.name,
        good=case.good,
        runs=runs,
        rolled_back=len(back),
        done=sum(standing.phase is Phase.DONE for standing, _, _ in found),
        requests_median=statistics.median(back) if back else None,
        requests_p95=back[min(len(back) - 1, int(0.95 * len(back)))] if back else None,
        requests_most=back[-1] if back else None,
        seconds_median=statistics.median(seconds for _, _, seconds in found),
    )


def _poisson(mean: float, draw: random.Random) -> int:
    """Draw from a Poisson distribution, by the times between arrivals; means here are tens to hundreds."""
    count, left = 0, mean
    while (left := left - draw.expovariate(1.0)) > 0:
        count += 1
    return count


def _binomial(count: int, share: float, draw: random.Random) -> int:
    return sum(draw.random() < share for _ in range(count))


def main(
    good: Annotated[int, typer.Option(min=1, help="Good canaries of each kind.")] = 200,
    bad: Annotated[int, typer.Option(min=1, help="Bad canaries of each kind.")] = 50,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second on the route.")] = 50.0,
    seed: Annotated[int, typer.Option()] = 1,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Exit with 1 when more good canaries were rolled back than is stated, or a bad one was not."""
    began = time.process_time()
    results = [measure(case, good if case.good else bad, rate, seed) for case in CASES]
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        _show(results, rate, time.process_time() - began)
    if any(r.rolled_back > ALPHA * r.runs if r.good else r.rolled_back < r.runs for r in results):
        raise typer.Exit(1)


def _show(results: list[Result], rate: float, cpu_s: float) -> None:
    table = Table(
        "canary", "runs", "rolled back", "to 100 %", "its requests until then: median", "p95", "most", "s"
    )
    for r in results:
        cells: Mapping[str, object] = asdict(r)
        shown = ("case", "runs", "rolled_back", "done", "requests_median", "requests_p95", "requests_most")
        table.add_row(
            *("" if cells[name] is None else str(cells[name]) for name in shown), f"{r.seconds_median:g}"
        )
    Console().print(table)
    print(f"{rate:g} requests/s; stated bound of false rollbacks {ALPHA:.0%}; {cpu_s:.1f} s of CPU")


if __name__ == "__main__":
    typer.run(main)
