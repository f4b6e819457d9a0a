"""Admission policies in the simulator: none, vLLM's own limits, static thresholds, and Sluice's gate.

    python -m benchmarks.admission_policies --azure TRACE.csv --mooncake TRACE.jsonl --plot FILE.png
    python -m benchmarks.admission_policies --quick

The gate is the production code (``admission.gate``) on the simulator's clock. Each half of a trace has its
own capacity: the highest rate at which 95 % of its requests meet the SLO without admission. A policy's free
parameters are those with the most goodput at 2 and 4 times capacity on the first half; the second half is
reported. Every policy gets the same arrivals, tenants (20, Zipf) and priorities (10 % high, 20 % low).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from evaluation.simulator.experiment import Kind, Setting, SimulationJob, best, candidates, capacity, run
from evaluation.simulator.measures import RunSummary, SimulatedSlo
from evaluation.simulator.profiles import PROFILES
from evaluation.simulator.values import Arrival, Profile
from evaluation.simulator.workload import WorkloadShape, halves, paced, rate_of, requests_of
from ops.replay.options import ReplayError
from ops.replay.trace import read_trace

DATA = Path(__file__).resolve().parent / "data"
# Prompts of Mooncake's trace are up to 190,000 tokens long; a sixteenth of them fits a 4,096-token context.
SCALES = {"azure": 1.0, "mooncake": 1 / 16}
LOADS = (0.5, 1.0, 1.5, 2.0, 4.0)
TUNED_AT = (2.0, 4.0)
QUICK_ROWS = 800
TABLE_WIDTH = 132
PARALLEL = max(1, min(4, os.cpu_count() or 1))
# Bursts longer than this cannot be served later: an answer occupies the worker for about this long.
WINDOW_S = 30.0
# The limits that the gate must meet at 2 and 4 times capacity.
GOODPUT_SHARE, HIGH_IN_SLO, WASTED, FAIR = 0.95, 0.99, 0.02, 0.95


@dataclass(frozen=True, slots=True)
class Row:
    """A policy's figures at one load of the second half."""

    load: float
    policy: str
    setting: str
    summary: RunSummary


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace. Rates are requests per second; ``offered``: the arrivals in each ``WINDOW_S``, by load."""

    trace: str
    profile: str
    capacity_first: float
    capacity_second: float
    rows: tuple[Row, ...]
    offered: Mapping[float, tuple[int, ...]]

    @property
    def best(self) -> float:
        """Return the highest goodput of any policy at any load."""
        return max(row.summary.goodput for row in self.rows)

    def reachable(self, load: float) -> float:
        """Return how much of ``best`` is possible at a load at which some windows have few arrivals.

        It is the goodput of a policy that serves all arrivals of a window, at most at the rate of ``best``.
        """
        counts = self.offered[load]
        return sum(min(count, self.best * WINDOW_S) for count in counts) / (len(counts) * WINDOW_S)


def shaped(name: str, path: Path, profile: Profile, quick: bool) -> tuple[Profile, list[Arrival]]:
    """Return a trace's requests, and the profile with prefix units of the trace's size."""
    trace = read_trace(path, limit=2 * QUICK_ROWS if quick else None)
    unit = round(trace.block_tokens * SCALES[name])
    fitting = replace(profile, unit_tokens=unit) if unit else profile
    return fitting, requests_of(trace, WorkloadShape(prompt_scale=SCALES[name]))


def compare(
    name: str,
    path: Path,
    profile: Profile,
    slo: SimulatedSlo,
    *,
    quick: bool,
    pool: ProcessPoolExecutor,
    bar: Progress,
) -> Comparison:
    """Measure the capacity of one trace, tune every policy on it and report them."""
    profile, requests = shaped(name, path, profile, quick)
    first, second = halves(requests)
    loads = (1.0, 4.0) if quick else LOADS
    tried = {kind: candidates(kind, profile, slo, few=quick) for kind in Kind}
    tuning = [(kind, setting, load) for kind in Kind for setting in tried[kind] for load in TUNED_AT]
    tuning = [one for one in tuning if len(tried[one[0]]) > 1]
    task = bar.add_task(name, total=2 + len(tuning) + len(Kind) * len(loads))

    def all_of(jobs: Sequence[SimulationJob]) -> list[RunSummary]:
        results = []
        for result in pool.map(run, jobs):
            bar.advance(task)
            results.append(result)
        return results

    first_rate, second_rate = pool.map(capacity, (first, second), (profile,) * 2, (slo,) * 2)
    bar.advance(task, 2)
    tuned = all_of(
        [SimulationJob(first, load * first_rate, profile, slo, setting) for _, setting, load in tuning]
    )
    goodput: dict[Setting, list[float]] = {}
    for (_, setting, _), summary in zip(tuning, tuned, strict=True):
        goodput.setdefault(setting, []).append(summary.goodput)
    chosen = {
        kind: best(settings, [goodput.get(setting, [0.0]) for setting in settings])
        for kind, settings in tried.items()
    }
    cells = [(load, chosen[kind]) for load in loads for kind in Kind]
    summaries = all_of(
        [SimulationJob(second, load * second_rate, profile, slo, setting) for load, setting in cells]
    )
    rows = tuple(
        Row(load, setting.kind.value, setting.label, summary)
        for (load, setting), summary in zip(cells, summaries, strict=True)
    )
    offered = {load: windows(paced(second, load * second_rate / rate_of(second))) for load in loads}
    return Comparison(name, profile.name, first_rate, second_rate, rows, offered)


def windows(arrivals: Sequence[Arrival]) -> tuple[int, ...]:
    """Return the number of arrivals in each whole window."""
    counts = [0] * max(1, int(arrivals[-1].at / WINDOW_S))
    for one in arrivals:
        if one.at < len(counts) * WINDOW_S:
            counts[int(one.at / WINDOW_S)] += 1
    return tuple(counts)


def missed(comparison: Comparison) -> list[str]:
    """Return the limits that the gate misses, as text."""
    found = []
    for row in comparison.rows:
        if row.policy != Kind.SLUICE or row.load not in TUNED_AT:
            continue
        one = row.summary
        at = f"{comparison.trace} at {row.load:g} ×"
        share = one.goodput / comparison.best
        if share < GOODPUT_SHARE:
            here = max(other.summary.goodput for other in comparison.rows if other.load == row.load)
            found.append(
                f"{at}: goodput {share:.1%} of the best at any load, {one.goodput / here:.1%} of here; what "
                f"comes allows {comparison.reachable(row.load) / comparison.best:.1%}"
            )
        if one.preemptions:
            found.append(f"{at}: {one.preemptions} preemptions")
        if one.by_priority.get(1, 1.0) < HIGH_IN_SLO:
            found.append(f"{at}: {one.by_priority[1]:.1%} of high priority in SLO")
        if one.wasted >= WASTED:
            found.append(f"{at}: {one.wasted:.1%} of tokens wasted")
        if one.fairness < FAIR:
            found.append(f"{at}: fairness {one.fairness:.3f}")
    return found


def table_of(comparison: Comparison) -> Table:
    """Return the table of one trace."""
    table = Table(
        title=f"{comparison.trace} on {comparison.profile}: "
        f"capacity {comparison.capacity_second:.2f} requests/s"
    )
    columns = ("load", "policy", "goodput/s", "of best %", "in SLO high/normal/low %")
    for column in (*columns, "TTFT p50/p99 s", "TPOT p99 s", "preempted", "wasted %", "fairness"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in comparison.rows:
        one = row.summary
        ranks = "/".join(f"{100 * one.by_priority.get(rank, 0.0):.1f}" for rank in (1, 0, -1))
        table.add_row(
            f"{row.load:g} ×",
            row.policy,
            f"{one.goodput:.2f}",
            f"{100 * one.goodput / comparison.best:.1f}",
            ranks,
            f"{one.ttft_p50_s:.2f} / {one.ttft_p99_s:.2f}",
            f"{one.tpot_p99_s:.3f}",
            f"{one.preemptions}",
            f"{100 * one.wasted:.2f}",
            f"{one.fairness:.3f}",
            end_section=row.policy == Kind.SLUICE,
        )
    return table


def plot(comparisons: Sequence[Comparison], slo: SimulatedSlo, path: Path) -> None:
    """Plot goodput, high priority within the SLO, TTFT and waste over the load, one column per trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: tuple[tuple[str, Callable[[RunSummary], float]], ...] = (
        ("goodput, requests/s", lambda one: one.goodput),
        ("high priority in SLO, %", lambda one: 100 * one.by_priority.get(1, 0.0)),
        ("p99 TTFT of the answered, s", lambda one: one.ttft_p99_s),
        ("tokens wasted, %", lambda one: 100 * one.wasted),
    )
    figure, axes = pyplot.subplots(
        len(panels), len(comparisons), figsize=(5 * len(comparisons), 10), sharex=True, squeeze=False
    )
    for column, comparison in enumerate(comparisons):
        for line, (label, value) in enumerate(panels):
            axis = axes[line][column]
            for kind in Kind:
                rows = [row for row in comparison.rows if row.policy == kind]
                axis.plot(
                    [row.load for row in rows], [value(row.summary) for row in rows], "o-", label=kind.value
                )
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
            if "TTFT" in label:
                axis.set_yscale("log")
                axis.axhline(slo.ttft_s, color="grey", linestyle="--", linewidth=1)
        axes[0][column].set_title(f"{comparison.trace}, {comparison.profile}")
        axes[-1][column].set_xlabel("load, times capacity")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(
    azure: Annotated[Path, typer.Option(help="Azure's trace.")] = DATA / "azure_llm_conv_2023_2000.csv",
    mooncake: Annotated[Path, typer.Option(help="Mooncake's trace.")] = DATA / "mooncake_synthetic_500.jsonl",
    profile: Annotated[str, typer.Option(help=f"A worker: {', '.join(PROFILES)}.")] = "a10g-8b-awq",
    slo_ttft: Annotated[float, typer.Option(min=0.01, help="Seconds to the first token.")] = 5.0,
    slo_tpot: Annotated[float, typer.Option(min=0.001, help="Seconds between tokens, mean.")] = 0.25,
    quick: Annotated[bool, typer.Option(help="Few rows, two loads, few settings: a smoke test.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Draw the figures as PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare admission policies on both traces."""
    if profile not in PROFILES:
        raise typer.BadParameter(f"no profile {profile!r}; one of {', '.join(PROFILES)}")
    console, slo = Console(width=TABLE_WIDTH), SimulatedSlo(slo_ttft, slo_tpot)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(PARALLEL) as pool,
        Progress(*columns, console=Console(stderr=True), transient=True) as bar,
    ):
        comparisons = [
            compare(name, path, PROFILES[profile], slo, quick=quick, pool=pool, bar=bar)
            for name, path in (("azure", azure), ("mooncake", mooncake))
        ]
    report: dict[str, Any] = {
        "slo": asdict(slo),
        "quick": quick,
        "comparisons": [asdict(one) for one in comparisons],
        "missed": [text for one in comparisons for text in missed(one)],
    }
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if plot_to is not None:
        plot(comparisons, slo, plot_to)
    if as_json:
        typer.echo(json.dumps(report))
        return
    for comparison in comparisons:
        console.print(table_of(comparison))
        for row in comparison.rows[-len(Kind) :]:
            if row.setting:
                console.print(f"{row.policy}: {row.setting}")
    for text in report["missed"]:
        console.print(f"missed: {text}")


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ReplayError, OSError) as error:  # of a trace, or of a file to write
        raise SystemExit(str(error)) from None
