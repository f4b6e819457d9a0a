"""Overload of an engine slower than its targets assume: the adaptive limit in the simulator.

    python -m benchmarks.admission_pace

The targets are measured on a quiet machine; then other work slows it down. The production gate stands in
front of the simulated worker of `benchmarks.admission_live` (with the step times fitted there), which becomes
slower in one of several ways: 10 s at 0.6 times capacity, then 40 s at 2 or 4 times, for each of three
stretches of the Azure excerpt. Requests without an answer 1 s after the end are aborted.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from admission.values import AdmissionLimits
from evaluation.simulator.measures import SimulatedSlo, summarize
from evaluation.simulator.policies import GatePolicy
from evaluation.simulator.run import simulate
from evaluation.simulator.values import Arrival, Profile
from evaluation.simulator.workload import WorkloadShape, paced, rate_of, requests_of
from ops.replay.trace import read_trace

TRACE = Path(__file__).resolve().parent / "data" / "azure_llm_conv_2023_2000.csv"
SHAPE = WorkloadShape(prompt_scale=0.25, max_prompt=600, max_output=160, tenants=6)
# The embedded engine and vLLM as benchmarks.admission_live measured them, with its SLO and capacity.
ENGINES = {
    "embedded": Profile(
        "embedded", 0.0018, 149e-6, 126e-6, 0.5e-6, 400, 16, 16, 256, unit_tokens=16, reserve_prompt=True
    ),
    "vllm": Profile("vllm", 0.0022, 128e-6, 267e-6, 0.0, 200, 32, 16, 256, unit_tokens=32),
}
SLO, CAPACITY = SimulatedSlo(0.5, 0.0129), 10.8
LOADS = (2.0, 4.0)
WARM_S, WARM_LOAD, LOADED_S = 10.0, 0.6, 40.0
STRETCHES, STRETCH_ROWS = 3, 150


class SpeedChange(StrEnum):
    """How the speed changes."""

    STEADY = "as measured"
    SLOW = "1.8 times slower throughout"
    WANDERS = "1 to 2 times slower, anew each 4 s of work on average"
    TURNS = "1.7 times slower after 15 s of work"
    STALLS = "1.2 times slower, one step in a hundred 30 to 150 ms longer"


@dataclass(slots=True)
class Speed:
    """A machine's speed as a function of the work that it has done."""

    way: SpeedChange
    draw: random.Random
    busy_s: float = 0.0
    factor: float = 1.0
    until_s: float = 0.0

    def takes(self, seconds: float) -> float:
        """Return how long a step of ``seconds`` takes at the current speed."""
        match self.way:
            case SpeedChange.STEADY:
                pass
            case SpeedChange.SLOW:
                self.factor = 1.8
            case SpeedChange.WANDERS if self.busy_s >= self.until_s:
                self.factor = self.draw.uniform(1.0, 2.0)
                self.until_s = self.busy_s + self.draw.expovariate(1 / 4.0)
            case SpeedChange.TURNS:
                self.factor = 1.0 if self.busy_s < 15.0 else 1.7
            case SpeedChange.STALLS:
                self.factor = 1.2
                if self.draw.random() < 0.01:
                    seconds += self.draw.uniform(0.03, 0.15)
        taken = seconds * self.factor
        self.busy_s += taken
        return taken


@dataclass(frozen=True, slots=True)
class Uneven(Profile):
    """A simulated worker on a machine of varying speed."""

    speed: Speed = field(default_factory=lambda: Speed(SpeedChange.STEADY, random.Random(0)))

    def step_s(self, prefill: int, sequences: int, context: int) -> float:
        """How long a step takes now, seconds."""
        return self.speed.takes(Profile.step_s(self, prefill, sequences, context))


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, way and load: means over the stretches. Rates are requests per second, shares 0 to 1."""

    engine: str
    way: str
    load: float
    goodput: float
    wasted: float
    high: float
    fairness: float


def stretch(whole: Sequence[Arrival], start: int, load: float) -> tuple[list[Arrival], int]:
    """Return a quiet phase followed by the overload, and how many requests belong to the quiet phase."""
    quiet = whole[start : start + round(WARM_S * WARM_LOAD * CAPACITY)]
    rest = whole[start + len(quiet) :][: round(load * CAPACITY * LOADED_S)]
    first = paced(quiet, WARM_LOAD * CAPACITY / rate_of(quiet))
    begins = first[-1].at + 1.0
    then = [replace(one, at=one.at + begins) for one in paced(rest, load * CAPACITY / rate_of(rest))]
    both = [replace(one, number=number, max_tokens=one.output) for number, one in enumerate([*first, *then])]
    return both, len(first)


def row_of(engine: str, way: SpeedChange, load: float, whole: Sequence[Arrival]) -> Row:
    """Simulate one engine, way and load."""
    base = ENGINES[engine]
    limits = AdmissionLimits(
        max_wait_s=SLO.ttft_s,
        tpot_slo_s=SLO.tpot_s,
        ttft_slo_s=SLO.ttft_s,
        first_token_within_s=SLO.ttft_s,
        max_prefill_tokens=base.max_num_batched_tokens,
    )
    found = []
    for number in range(STRETCHES):
        arrivals, quiet = stretch(whole, number * STRETCH_ROWS, load)
        shape = {name: getattr(base, name) for name in Profile.__dataclass_fields__}
        profile = Uneven(**shape, speed=Speed(way, random.Random(number)))
        outcomes = simulate(arrivals, profile, lambda worker: GatePolicy(limits, produced=worker.produced))[
            quiet:
        ]
        for outcome in outcomes:
            if outcome.finished_at is not None and outcome.finished_at > arrivals[-1].at + 2 * SLO.ttft_s:
                outcome.first_token_at = outcome.finished_at = None
                outcome.computed = 0
        found.append(summarize(outcomes, SLO))
    return Row(
        engine,
        way.value,
        load,
        statistics.mean(one.goodput for one in found),
        statistics.mean(one.wasted for one in found),
        statistics.mean(one.by_priority.get(1, 1.0) for one in found),
        statistics.mean(one.fairness for one in found),
    )


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("engine", lambda row: row.engine),
    ("its speed", lambda row: row.way),
    ("load", lambda row: f"{row.load:g} ×"),
    ("goodput/s", lambda row: f"{row.goodput:.2f}"),
    ("wasted %", lambda row: f"{100 * row.wasted:.2f}"),
    ("high in SLO %", lambda row: f"{100 * row.high:.1f}"),
    ("fairness", lambda row: f"{row.fairness:.3f}"),
)


def main(
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(ENGINES)}, or all.")] = "all",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Overload engines of uneven speed."""
    if engine != "all" and engine not in ENGINES:
        raise typer.BadParameter(f"no engine {engine!r}; one of {', '.join(ENGINES)}, all")
    whole = requests_of(read_trace(TRACE), SHAPE)
    chosen = tuple(ENGINES) if engine == "all" else (engine,)
    rows = [row_of(one, way, load, whole) for one in chosen for way in SpeedChange for load in LOADS]
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    table = Table()
    for heading, _ in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("engine", "its speed") else "right")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in COLUMNS))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
