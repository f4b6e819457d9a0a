"""The plots of ``docs/admission.md``, drawn from the production code on the simulator's clock.

    python -m benchmarks.admission_plots --policy FILE.png --forecast FILE.png

The first shows the ladder and the order in which a queue is served. The second compares predicted with actual
memory and first tokens, on a simulated worker that is short of memory, at twice its capacity.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from admission.fair_queue import FairQueue, Waiting
from admission.ladder import RUNGS, Ladder
from admission.values import AdmissionLimits, BackendLoad
from evaluation.simulator.measures import percentile
from evaluation.simulator.policies import GatePolicy, Moves
from evaluation.simulator.profiles import A10G_8B_FP16
from evaluation.simulator.run import simulate
from evaluation.simulator.values import SimulatedRequest
from evaluation.simulator.worker import SimulatedWorker
from evaluation.simulator.workload import WorkloadShape, paced, rate_of, requests_of
from ops.replay.trace import read_trace

TRACE = Path(__file__).resolve().parent / "data" / "azure_llm_conv_2023_2000.csv"
# Twice the capacity of that worker (docs/admission-simulator.md), requests a second.
RATE = 1.36
LIMITS = AdmissionLimits(max_wait_s=5.0, first_token_within_s=5.0, max_prefill_tokens=512)
# How far ahead the actual peak is taken: about as long as an answer takes.
HORIZON_S = 20.0
# The part of the run that is drawn, in seconds.
WINDOW_S = (200.0, 600.0)


@dataclass(slots=True)
class RunTrace:
    """A run: times with usage and forecast; predicted and actual times to first token, in seconds."""

    at: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    foreseen: list[float] = field(default_factory=list)
    first_tokens: list[tuple[float, float]] = field(default_factory=list)


class Watched(GatePolicy):
    """The gate, with every forecast recorded."""

    def __init__(self, worker: SimulatedWorker, seen: RunTrace) -> None:
        super().__init__(LIMITS, produced=worker.produced)
        self._worker = worker
        self._seen = seen

    def look(self, load: BackendLoad, now: float) -> Moves:
        """Act as the gate does, and record the pool's usage and its forecast."""
        moves = super().look(load, now)
        used, peak = self.gate.work.memory.usage(now)
        self._seen.at.append(now)
        self._seen.used.append(used)
        self._seen.foreseen.append(peak)
        return moves

    def first_token(self, outcome: SimulatedRequest, now: float) -> None:
        """Act as the gate does, and record the predicted and the actual time to the first token."""
        ticket = self._tickets[outcome.arrival.number]
        self._seen.first_tokens.append((ticket.estimated_first_token_s, now - outcome.arrival.at))
        super().first_token(outcome, now)


def watched_run() -> RunTrace:
    """Run a simulated worker that is limited by memory, at twice its capacity."""
    seen = RunTrace()
    requests = requests_of(read_trace(TRACE), WorkloadShape())
    arrivals = paced(requests, RATE / rate_of(requests))
    simulate(arrivals, A10G_8B_FP16, lambda worker: Watched(worker, seen))
    return seen


def draw_ladder(axis: Any) -> None:
    """Draw the longest allowed answer over the queue's depth, as the load rises and falls."""
    ladder = Ladder()
    for depths, style, label in (
        (range(1200), "-", "growing"), (range(1199, -1, -1), "--", "shrinking"),
    ):  # fmt: skip
        longest = []
        for depth in depths:
            rung = ladder.at(depth)
            longest.append(0 if rung.shed_all else rung.max_tokens or 4096)
        axis.plot(list(depths), longest, style, label=f"queue {label}")
    axis.set_xlabel("requests that wait")
    axis.set_ylabel("longest answer of a new request, tokens")
    shed = next(rung.depth for rung in RUNGS if rung.shed_low)
    axis.axvline(shed, color="grey", linestyle=":", label="low priority refused")
    axis.legend()
    axis.set_title("the ladder")


def draw_order(axis: Any) -> None:
    """Draw in which order a queue is served that all joined at once: classes, and fair shares within one."""
    draw, line = random.Random(1), FairQueue[Waiting](aging_s=0)
    number = 0
    # One tenant sends ten times as many requests as the others, with prompts of the same lengths.
    for tenant, count in (("large", 100), ("small", 10), ("other", 10)):
        for _ in range(count):
            number += 1
            tokens = draw.randint(500, 2500)
            rank = 1 if draw.random() < 0.1 else 0
            line.join(Waiting(number, tenant, rank, tokens, tokens, 0, 0.0, 1e9))
    served: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    spent, turn = defaultdict[str, int](int), 0
    while (item := line.peek()) is not None:
        line.serve(item)
        turn += 1
        spent[item.tenant] += item.cost
        served[item.tenant].append((turn, spent[item.tenant]))
    for tenant, points in served.items():
        axis.step([x for x, _ in points], [y / 1000 for _, y in points], where="post", label=tenant)
    axis.set_xlabel("requests served")
    axis.set_ylabel("thousand tokens of service")
    axis.legend(title="tenant")
    axis.set_title("a line of 120: equal shares first, then who asked for more")


def draw_memory(axis: Any, seen: RunTrace) -> None:
    """Draw the pool's usage, the forecast of its peak, and the watermarks."""
    truth = []
    last = 0
    for index, at in enumerate(seen.at):
        while last < len(seen.at) and seen.at[last] < at + HORIZON_S:
            last += 1
        truth.append(max(seen.used[index:last]))
    axis.plot(seen.at, seen.foreseen, linewidth=0.8, label="forecast of the peak")
    axis.plot(seen.at, truth, linewidth=0.8, label=f"fullest in the next {HORIZON_S:g} s")
    axis.plot(seen.at, seen.used, linewidth=0.5, alpha=0.6, label="used now")
    for name, mark in zip(("low", "normal", "high"), LIMITS.watermarks, strict=True):
        axis.axhline(mark, color="grey", linestyle=":", linewidth=0.8)
        axis.text(WINDOW_S[0] + 2, mark, name, fontsize=7, va="bottom")
    axis.set_xlim(*WINDOW_S)
    axis.set_ylim(0, 1.1)
    axis.set_xlabel("seconds")
    axis.set_ylabel("share of the KV pool")
    axis.legend(loc="lower right")
    axis.set_title("memory: forecast and truth")


def draw_first_tokens(axis: Any, seen: RunTrace) -> None:
    """Draw predicted against actual times to the first token."""
    foreseen, real = zip(*seen.first_tokens, strict=True)
    errors = sorted(abs(b - a) for a, b in seen.first_tokens)
    axis.plot(foreseen, real, ".", markersize=2)
    axis.plot([0, 5], [0, 5], color="grey", linewidth=0.8)
    axis.set_xlabel("first token foreseen at the offer, s")
    axis.set_ylabel("first token came after, s")
    median_s, p90_s = percentile(errors, 0.5), percentile(errors, 0.9)
    axis.set_title(f"first tokens: off by {median_s:.2f} s (median), {p90_s:.2f} s (p90)")


def main(
    policy: Annotated[Path, typer.Option(help="Where the ladder and the order are drawn.")],
    forecast: Annotated[Path, typer.Option(help="Where forecast and truth are drawn.")],
) -> None:
    """Draw both plots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen = watched_run()
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4))
    draw_ladder(axes[0])
    draw_order(axes[1])
    figure.tight_layout()
    figure.savefig(policy, dpi=100)
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4))
    draw_memory(axes[0], seen)
    draw_first_tokens(axes[1], seen)
    figure.tight_layout()
    figure.savefig(forecast, dpi=100)


if __name__ == "__main__":
    typer.run(main)
