"""The production gate on the real embedded engine under overload, on a clock that other load hardly affects.

    python -m benchmarks.admission_engine
    python -m benchmarks.admission_engine --slower 1.5

Gate and engine run in one process and thread; the clock is the CPU time that they used, so that other work on
the machine counts little. First, 16 callers in a closed loop give the capacity and the pace of a full batch
(the target is 1.5 times that pace). Then rows of the Azure excerpt arrive at 0.6, and at 2 or 4 times the
capacity. With ``--slower`` the clock of this second part runs that much faster, as on a machine that now runs
other work too. Requests without an answer 1 s after the last arrival are aborted. The gate knows the length
of each answer, as in ``benchmarks.admission_live``.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from admission.values import AdmissionLimits, BackendLoad
from benchmarks.admission_calibration import MAX_NUM_BATCHED_TOKENS, engine_of
from benchmarks.admission_live import SHAPE, TRACE
from engine.engine import Engine
from engine.values import GenerationRequest, SamplingParams
from evaluation.simulator.measures import RunSummary, SimulatedSlo, summarize
from evaluation.simulator.policies import GatePolicy, Moves, Open, Policy
from evaluation.simulator.values import Arrival, SimulatedRequest
from evaluation.simulator.workload import paced, rate_of, requests_of
from ops.replay.trace import read_trace

REPOSITORY = Path(__file__).resolve().parent.parent
TOKEN_IDS = range(300, 1000)
NUM_BLOCKS, MAX_NUM_SEQS = 400, 16
TTFT_S, TPOT_TIMES = 0.5, 1.5
LOADS = (2.0, 4.0)
QUIET_LOAD, QUIET_S = 0.6, 8.0
CLOSED_ROWS = 100
NONE, OURS = "none", "sluice"


@dataclass(frozen=True, slots=True)
class Row:
    """A policy's figures at one load; ``limit`` is the adaptive limit at the end of the run."""

    load: float
    policy: str
    summary: RunSummary
    limit: int | None


class Bench:
    """The engine, an admission policy in front of it, and a clock of the CPU time used."""

    def __init__(self, engine: Engine, *, slower: float = 1.0) -> None:
        self._engine = engine
        self._slower = slower
        self._draw = random.Random(1)
        self._runs = 0

    def load(self) -> BackendLoad:
        """Return the load as the gateway reads it."""
        seen = self._engine.signals
        return BackendLoad(
            seen.running, seen.waiting, seen.kv_usage, seen.total_blocks, seen.block_size, MAX_NUM_SEQS
        )

    def run(self, requests: Sequence[Arrival], policy: Policy, *, until_s: float) -> list[SimulatedRequest]:
        """Send each request at its time; return the outcomes. Unanswered ones are aborted at ``until_s``."""
        self._runs += 1
        outcomes = [SimulatedRequest(one) for one in requests]
        inside: dict[str, SimulatedRequest] = {}
        now, following = 0.0, 0
        while now < until_s and (following < len(outcomes) or self._engine.has_work or policy.watching):
            change = policy.next_change()
            if not self._engine.has_work:  # nothing happens before the next arrival or policy change
                coming = outcomes[following].arrival.at if following < len(outcomes) else until_s
                now = max(now, min(coming, until_s if change is None else change))
            begun = time.process_time()
            outputs = self._engine.step() if self._engine.has_work else ()
            now += self._slower * (time.process_time() - begun)
            begun = time.process_time()
            while following < len(outcomes) and outcomes[following].arrival.at <= now:
                outcome = outcomes[following]
                following += 1
                self._act(policy.arrive(outcome, self.load(), outcome.arrival.at), inside, outcome.arrival.at)
            for output in outputs:
                outcome = inside[output.request_id]
                outcome.produced = output.output_tokens
                if outcome.first_token_at is None:
                    outcome.first_token_at = now
                    policy.first_token(outcome, now)
                if output.finish_reason is not None:
                    outcome.finished_at = now
                    outcome.computed = outcome.arrival.prompt + outcome.produced
                    del inside[output.request_id]
                    policy.finished(outcome, now)
            self._act(policy.look(self.load(), now), inside, now)
            now += self._slower * (time.process_time() - begun)
        for name, outcome in inside.items():
            self._engine.abort(name)
            outcome.first_token_at = None
        while self._engine.has_work:
            self._engine.step()
        return outcomes

    def closed(self, requests: Sequence[Arrival], callers: int) -> list[SimulatedRequest]:
        """Run a closed loop of ``callers``, each of which asks again when it has its answer."""
        return self.run([replace(one, at=0.0) for one in requests], Callers(callers), until_s=1e9)

    def _act(self, moves: Moves, inside: dict[str, SimulatedRequest], now: float) -> None:
        for outcome, reason in moves.refuse:
            outcome.refused_at, outcome.reason = now, reason
        for outcome in moves.hand_on:
            outcome.handed_on_at = now
            name = f"{self._runs}-{outcome.arrival.number}"
            inside[name] = outcome
            sampling = SamplingParams(outcome.arrival.output, temperature=0.0, ignore_eos=True)
            prompt = tuple(self._draw.choices(TOKEN_IDS, k=outcome.arrival.prompt))
            self._engine.add(GenerationRequest(name, prompt, sampling))


class Callers(Open):
    """A policy that hands on at most as many requests at once as there are callers."""

    def __init__(self, callers: int) -> None:
        self._free = callers
        self._waiting: list[SimulatedRequest] = []

    def arrive(self, outcome: SimulatedRequest, load: BackendLoad, now: float) -> Moves:
        """Let the request wait until a caller is free."""
        self._waiting.append(outcome)
        return Moves()

    def look(self, load: BackendLoad, now: float) -> Moves:
        """Hand on one request for each free caller."""
        begun, self._waiting = self._waiting[: self._free], self._waiting[self._free :]
        self._free -= len(begun)
        return Moves(hand_on=tuple(begun))

    def finished(self, outcome: SimulatedRequest, now: float) -> None:
        """Free the request's caller."""
        self._free += 1


def examine(
    model: Path, seconds: float, slower: float, policies: Sequence[str]
) -> tuple[SimulatedSlo, float, list[Row]]:
    """Return the targets, the capacity in requests/s, and the figures of every policy at every load."""
    whole = [replace(one, max_tokens=one.output) for one in requests_of(read_trace(TRACE), SHAPE)]
    engine = engine_of(model, NUM_BLOCKS, MAX_NUM_SEQS)
    unhurried = Bench(engine)
    unhurried.closed(whole[:20], MAX_NUM_SEQS)  # compiles what is compiled at first use
    finished = unhurried.closed(whole[:CLOSED_ROWS], MAX_NUM_SEQS)
    capacity = len(finished) / max(outcome.finished_at or 0.0 for outcome in finished)
    pace = statistics.median(outcome.tpot_s or 0.0 for outcome in finished if outcome.produced > 1)
    slo = SimulatedSlo(TTFT_S, TPOT_TIMES * pace)
    limits = AdmissionLimits(
        max_wait_s=slo.ttft_s,
        tpot_slo_s=slo.tpot_s,
        ttft_slo_s=slo.ttft_s,
        first_token_within_s=slo.ttft_s,
        max_prefill_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    bench, rows, start = Bench(engine, slower=slower), [], CLOSED_ROWS
    for load in LOADS:
        quiet_rows = whole[start : start + round(QUIET_LOAD * capacity * QUIET_S)]
        wanted = whole[start + len(quiet_rows) :][: round(load * capacity * seconds)]
        start += len(quiet_rows) + len(wanted)
        arrivals = paced(quiet_rows, QUIET_LOAD * capacity / rate_of(quiet_rows))
        begins = arrivals[-1].at
        rest = paced(wanted, load * capacity / rate_of(wanted))
        arrivals += [replace(one, at=begins + one.at) for one in rest]
        for name in policies:
            policy = Open() if name == NONE else GatePolicy(limits, produced=lambda outcome: outcome.produced)
            before = engine.signals.preemptions
            outcomes = bench.run(arrivals, policy, until_s=arrivals[-1].at + 2 * slo.ttft_s)
            outcomes = outcomes[len(quiet_rows) :]
            found = replace(summarize(outcomes, slo), preemptions=engine.signals.preemptions - before)
            rows.append(
                Row(load, name, found, policy.gate.limit.value if isinstance(policy, GatePolicy) else None)
            )
    return slo, capacity, rows


def main(
    model: Annotated[Path, typer.Option(help="The model's folder.")] = REPOSITORY / "models" / "demo",
    seconds: Annotated[float, typer.Option(min=5, help="Of arrivals at each load, on that clock.")] = 30.0,
    slower: Annotated[float, typer.Option(min=0.1, help="A step takes so many times as long.")] = 1.0,
    ours_only: Annotated[bool, typer.Option("--ours-only", help="Not without admission.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Overload the embedded engine behind the gate."""
    slo, capacity, rows = examine(model, seconds, slower, (OURS,) if ours_only else (NONE, OURS))
    if as_json:
        typer.echo(
            json.dumps({"slo": asdict(slo), "capacity": capacity, "rows": [asdict(row) for row in rows]})
        )
        return
    console = Console(width=120)
    console.print(
        f"capacity {capacity:.1f} requests/s; SLO {slo.ttft_s:g} s to the first token, "
        f"{slo.tpot_s * 1e3:.1f} ms a token; steps {slower:g} times as long; {seconds:g} s a load"
    )
    table = Table()
    for heading in (
        "load", "policy", "goodput/s", "in SLO: high / normal / low %", "TTFT p50 / p99 s", "preempted",
        "wasted %", "fairness", "limit at the end",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        one = row.summary
        table.add_row(
            f"{row.load:g} ×",
            row.policy,
            f"{one.goodput:.2f}",
            " / ".join(f"{100 * one.by_priority.get(rank, 0.0):.1f}" for rank in (1, 0, -1)),
            f"{one.ttft_p50_s:.2f} / {one.ttft_p99_s:.2f}",
            f"{one.preemptions}",
            f"{100 * one.wasted:.2f}",
            f"{one.fairness:.3f}",
            "" if row.limit is None else str(row.limit),
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
