"""How much an agent's auxiliary calls slow down a person's turns, in the simulator.

    python -m benchmarks.agent_load

Turns (1,200 tokens, 250 in the answer, log-normal) and auxiliary calls (600 and 60: titles, summaries) arrive
independently (Poisson) at one simulated worker behind the shipped gate. The calls have the class that the
hint header gives them, or the same class as the turns. ``beyond``: more arrives than the worker can serve.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from admission.values import AdmissionLimits
from evaluation.simulator.measures import percentile
from evaluation.simulator.policies import GatePolicy
from evaluation.simulator.profiles import A10G_8B_AWQ
from evaluation.simulator.run import simulate
from evaluation.simulator.values import Arrival, SimulatedRequest

Fates = Sequence[SimulatedRequest]

TURN, CALL = (1_200, 250), (600, 60)
MAX_PROMPT, MAX_TOKENS = 3_400, 600
TURNS_A_S = (0.3, 0.6)
CALLS_A_S = (0.0, 0.5, 1.0, 2.0, 4.0)
# Calls per second above which the worker cannot serve all (it serves 2.6 with 0.3 turns, 1.7 with 0.6).
BEYOND = {0.3: 4.0, 0.6: 2.0}


def poisson(rate: float, seconds: float, lengths: tuple[int, int], priority: int, seed: int) -> list[Arrival]:
    """Requests of one kind, in order of arrival."""
    draw, at, made = random.Random(seed), 0.0, []
    while rate and (at := at + draw.expovariate(rate)) < seconds:
        prompt, output = (round(draw.lognormvariate(math.log(length), 0.6)) for length in lengths)
        made.append(
            Arrival(
                0, at, min(MAX_PROMPT, max(20, prompt)), min(MAX_TOKENS, max(2, output)), MAX_TOKENS,
                priority=priority,
            )
        )  # fmt: skip
    return made


def run(turns: float, calls: float, priority: int, seconds: float) -> tuple[Fates, Fates]:
    """Return the outcome of every turn, and of every auxiliary call."""
    of_turns = poisson(turns, seconds, TURN, 0, 7)
    began = {one.at for one in of_turns}
    arrivals = of_turns + poisson(calls, seconds, CALL, priority, 8)
    arrivals.sort(key=lambda one: one.at)
    ordered = [replace(one, number=number) for number, one in enumerate(arrivals)]
    limits = AdmissionLimits()
    outcomes = simulate(ordered, A10G_8B_AWQ, lambda worker: GatePolicy(limits, produced=worker.produced))
    return [one for one in outcomes if one.arrival.at in began], [
        one for one in outcomes if one.arrival.at not in began
    ]


def main(
    minutes: Annotated[float, typer.Option(min=1, help="Simulated time of each row.")] = 60.0,
) -> None:
    """Print the times to a turn's first token, without and with auxiliary calls."""
    table = Table(
        "turns/s", "calls/s", "class of calls", "TTFT p50 s", "p99 s", "beside none", "turns refused",
        "calls served",
    )  # fmt: skip
    for turns in TURNS_A_S:
        alone = 0.0
        for calls in CALLS_A_S:
            for priority in (-1, 0) if calls else (0,):
                of_turns, of_calls = run(turns, calls, priority, minutes * 60)
                times = sorted(one.ttft_s for one in of_turns if one.ttft_s is not None)
                p99 = percentile(times, 0.99)
                alone = alone or p99
                served = sum(one.finished_at is not None for one in of_calls)
                table.add_row(
                    f"{turns:g}",
                    f"{calls:g}" + (", beyond" if calls >= BEYOND[turns] else ""),
                    "" if not calls else "auxiliary" if priority else "as turns",
                    f"{percentile(times, 0.5):.2f}",
                    f"{p99:.2f}",
                    f"{p99 / alone - 1:+.0%}",
                    f"{sum(one.refused_at is not None for one in of_turns)} of {len(of_turns)}",
                    f"{served / len(of_calls):.0%}" if of_calls else "",
                )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
