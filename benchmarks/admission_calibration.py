"""How well the simulator predicts the embedded engine: fit its step times, then replay rows not used to fit.

    python -m benchmarks.admission_calibration
    python -m benchmarks.admission_calibration --rows 400 --json

The real engine runs the demo model in this process on one thread, with rows of the Azure excerpt at scaled
lengths in an open loop. Its clock is the CPU time it used, so other work on the machine counts little. Some
rows give steps of known composition, to which the simulator's four coefficients are fitted. Other rows are
replayed at several rates by the engine and by the simulator, on a pool small enough to preempt.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from engine.build import build_engine
from engine.engine import Engine
from engine.values import EngineConfig, GenerationRequest, SamplingParams
from evaluation.simulator.calibration import Fit, MeasuredStep, fit
from evaluation.simulator.measures import percentile
from evaluation.simulator.policies import Open
from evaluation.simulator.run import simulate
from evaluation.simulator.values import Arrival, Profile, SimulatedRequest
from evaluation.simulator.workload import WorkloadShape, paced, rate_of, requests_of
from ops.replay.trace import read_trace

REPOSITORY = Path(__file__).resolve().parent.parent
TRACE = REPOSITORY / "benchmarks" / "data" / "azure_llm_conv_2023_2000.csv"
SCALE = 0.25
SHAPE = WorkloadShape(prompt_scale=SCALE, max_prompt=800, max_output=160)
# Ids of text tokens: no special token is among them.
TOKEN_IDS = range(300, 1000)
BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 16, 32, 256
# Enough blocks to fit without a preemption, and few enough to preempt in the replays.
WIDE_BLOCKS, NARROW_BLOCKS = 2048, 400
RATES = (0.8, 1.2, 2.0)
# To fit, arrivals are this many times faster than in the trace: from a few sequences to a full batch.
SPEEDS = (6.0, 1e6)


@dataclass(frozen=True, slots=True)
class Replay:
    """The figures of a replay; seconds, and tokens per second."""

    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Check:
    """The engine's and the simulator's replay at one rate, a share of the most that the worker can serve."""

    rate: float
    real: Replay
    simulated: Replay


def engine_of(model: Path, blocks: int, max_num_seqs: int = MAX_NUM_SEQS) -> Engine:
    """Build the real engine on one thread, without a prefix cache: the trace's requests share no prefix."""
    return build_engine(
        EngineConfig(
            str(model),
            dtype="float32",
            device="cpu",
            max_model_len=1024,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            num_blocks=blocks,
            num_threads=1,
            seed=1,
            enable_prefix_caching=False,
            max_loras=0,
        )
    )


def replay(engine: Engine, requests: Sequence[Arrival]) -> tuple[list[SimulatedRequest], list[MeasuredStep]]:
    """Run the requests at their times on the CPU-time clock; return their outcomes and the steps."""
    draw = random.Random(requests[0].number)
    outcomes = [SimulatedRequest(one) for one in requests]
    by_id = {f"r{outcome.arrival.number}": outcome for outcome in outcomes}
    prompts = [tuple(draw.choices(TOKEN_IDS, k=one.prompt)) for one in requests]
    answering: dict[str, SimulatedRequest] = {}
    steps: list[MeasuredStep] = []
    now, following = 0.0, 0
    while following < len(outcomes) or engine.has_work:
        if not engine.has_work:
            now = max(now, outcomes[following].arrival.at)
        begun = time.process_time()
        while following < len(outcomes) and outcomes[following].arrival.at <= now:
            arrival = outcomes[following].arrival
            sampling = SamplingParams(arrival.output, temperature=0.0, ignore_eos=True)
            engine.add(GenerationRequest(f"r{arrival.number}", prompts[following], sampling))
            following += 1
        sequences = len(answering)
        context = sum(outcome.arrival.prompt + outcome.produced - 1 for outcome in answering.values())
        preempted = engine.signals.preemptions
        outputs = engine.step()
        took_s = time.process_time() - begun
        now += took_s
        signals = engine.signals
        if signals.preemptions == preempted and signals.tokens_scheduled >= sequences:
            steps.append(MeasuredStep(signals.tokens_scheduled - sequences, sequences, context, took_s))
        for output in outputs:
            outcome = by_id[output.request_id]
            outcome.produced = output.output_tokens
            if outcome.first_token_at is None:
                outcome.first_token_at = now
                answering[output.request_id] = outcome
            if output.finish_reason is not None:
                outcome.finished_at = now
                answering.pop(output.request_id, None)
    return outcomes, steps


def summary_of(outcomes: Sequence[SimulatedRequest], preemptions: int) -> Replay:
    """Return the figures of a replay in which every request was answered."""
    ttft = sorted(outcome.ttft_s or 0.0 for outcome in outcomes)
    tpot = sorted(outcome.tpot_s or 0.0 for outcome in outcomes)
    last = max(outcome.finished_at or 0.0 for outcome in outcomes)
    tokens = sum(outcome.produced for outcome in outcomes)
    return Replay(
        tokens / last, percentile(ttft, 0.5), percentile(ttft, 0.99), percentile(tpot, 0.5), preemptions
    )


def profile_of(found: Fit, blocks: int) -> Profile:
    """Return the simulator's profile of the engine."""
    return Profile(
        "demo-cpu",
        found.base_s,
        found.prefill_s,
        found.sequence_s,
        found.context_s,
        blocks,
        BLOCK_SIZE,
        MAX_NUM_SEQS,
        MAX_NUM_BATCHED_TOKENS,
        unit_tokens=BLOCK_SIZE,
        reserve_prompt=True,
    )


def calibrate(model: Path, rows: int) -> tuple[Fit, list[Check]]:
    """Fit on the first rows of the trace, and check on the rows after them."""
    requests = requests_of(read_trace(TRACE, limit=2 * rows), SHAPE)
    seen, unseen = requests[:rows], requests[rows:]
    wide = engine_of(model, WIDE_BLOCKS)
    replay(wide, paced(seen[:20], 1e6))  # compiles what is compiled at first use
    # Half of the rows are fitted before the checks and half after them: a shared machine's speed drifts.
    steps = [step for speed in SPEEDS for step in replay(wide, paced(seen[: rows // 2], speed))[1]]
    found = fit(steps)
    # The highest rate it can serve, from a run in which all requests arrive at once; rates are shares of it.
    whole = simulate(paced(unseen, 1e6), profile_of(found, NARROW_BLOCKS), lambda worker: Open())
    most = len(unseen) / max(outcome.finished_at or 0.0 for outcome in whole)
    narrow = engine_of(model, NARROW_BLOCKS)
    replayed = []
    for rate in RATES:
        arrivals = paced(unseen, rate * most / rate_of(unseen))
        before = narrow.signals.preemptions
        outcomes, _ = replay(narrow, arrivals)
        replayed.append((rate, arrivals, summary_of(outcomes, narrow.signals.preemptions - before)))
    for speed in SPEEDS:
        steps += replay(wide, paced(seen[rows // 2 :], speed))[1]
    found = fit(steps)
    checks = []
    for rate, arrivals, real in replayed:
        runs = simulate(arrivals, profile_of(found, NARROW_BLOCKS), lambda worker: Open())
        checks.append(Check(rate, real, summary_of(runs, sum(outcome.preemptions for outcome in runs))))
    return found, checks


def main(
    model: Annotated[Path, typer.Option(help="The model's folder.")] = REPOSITORY / "models" / "demo",
    rows: Annotated[int, typer.Option(min=20, max=1000, help="Rows to fit on; as many to check on.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Fit the simulator to the embedded engine and print its error."""
    found, checks = calibrate(model, rows)
    if as_json:
        typer.echo(json.dumps({"fit": asdict(found), "checks": [asdict(check) for check in checks]}))
        return
    console = Console(width=110)
    console.print(
        f"a step: {found.base_s * 1e3:.3f} ms + {found.prefill_s * 1e6:.1f} µs a prompt token + "
        f"{found.sequence_s * 1e6:.1f} µs a sequence + {found.context_s * 1e9:.1f} ns a token of context; "
        f"median error of a step {found.median_error:.1%}"
    )
    table = Table(title="the engine, the simulator, and the simulator's error")
    for column in ("rate", "what", "engine", "simulator", "error %"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for check in checks:
        real, simulated = asdict(check.real), asdict(check.simulated)
        for name, value in real.items():
            error = f"{100 * (simulated[name] / value - 1):+.1f}" if value else "-"
            table.add_row(f"{check.rate:g} ×", name, f"{value:.4g}", f"{simulated[name]:.4g}", error)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
