"""A fleet of 1 to 1,000 simulated workers behind the production pool and gate.

    python -m benchmarks.fleet --azure TRACE.csv --mooncake TRACE.jsonl --plot FILE.png --output FILE.json
    python -m benchmarks.fleet --sizes 1,2,10 --span 20

Workers, traffic and time are simulated. The pool's choice, its load and the admission gate are the production
classes, one set per gateway process, which knows the workers by its own scrapes. The load per worker is the
same for every size. The CPU time of each decision is measured.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from admission.values import AdmissionLimits
from benchmarks.fleet.decisions import Cost, cost_of
from benchmarks.fleet.measures import Figures, figures
from benchmarks.fleet.plot import plot
from benchmarks.fleet.scrapes import scrape_us
from benchmarks.fleet.simulation import Plan, Simulation
from benchmarks.fleet.traffic import MOONCAKE_SCALE, Source, read_source, traffic
from evaluation.simulator.measures import SimulatedSlo
from evaluation.simulator.profiles import A10G_8B_AWQ
from evaluation.simulator.values import Profile
from gateway.backends.workers.pool import WHOLE_UP_TO

DATA = Path(__file__).resolve().parent.parent / "data"
SIZES = "1,2,10,30,100,300,1000"
# About the rate that a single worker serves within the SLO, in requests per second.
RATES = {"azure": 1.0, "mooncake": 1.6}
# Workers per gateway process; but from ten workers on there are two, so that one can be restarted.
WORKERS_A_GATEWAY, TWO_FROM = 100, 10
# Small fleets are run repeatedly with other pieces of the trace, to reach about this many requests.
ENOUGH_REQUESTS = 1000
# The fleet size that is also run with staler views, more gateways and no affinity.
VARIED = 100
TABLE_WIDTH = 132


@dataclass(frozen=True, slots=True)
class Variant:
    """One fleet with other settings."""

    label: str
    gateways: int
    interval_s: float
    affinity: bool = True


VARIANTS = (
    Variant("1, 1 s", 1, 1.0),
    Variant("10, 0.2 s", 10, 0.2),
    Variant("10, 1 s", 10, 1.0),
    Variant("10, 5 s", 10, 5.0),
    Variant("10, 1 s, no affinity", 10, 1.0, affinity=False),
)


def gateways_for(workers: int) -> int:
    """Return the number of gateway processes in front of the workers."""
    return max(-(-workers // WORKERS_A_GATEWAY), 2 if workers >= TWO_FROM else 1)


def limits_for(slo: SimulatedSlo, profile: Profile) -> AdmissionLimits:
    """Return the gate's limits: a request may wait as long as its first token can still be in time."""
    return AdmissionLimits(
        max_wait_s=slo.ttft_s,
        tpot_slo_s=slo.tpot_s,
        first_token_within_s=slo.ttft_s,
        max_prefill_tokens=profile.max_num_batched_tokens,
    )


def run_fleet(
    source: Source,
    variant: Variant,
    workers: int,
    *,
    rate: float,
    span_s: float,
    slo: SimulatedSlo,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Figures:
    """Run one fleet, as often as needed for enough requests."""
    profile = replace(A10G_8B_AWQ, unit_tokens=source.unit_tokens or A10G_8B_AWQ.unit_tokens)
    results = []
    for turn in range(max(1, round(ENOUGH_REQUESTS / (rate * span_s * workers)))):
        draw = random.Random(f"{seed}/{workers}/{turn}")
        arrivals = traffic(source, workers, rate, span_s, draw)
        plan = Plan(
            workers,
            variant.gateways,
            variant.interval_s,
            variant.affinity,
            WHOLE_UP_TO,
            limits_for(slo, profile),
            draw.randrange(1 << 30),
        )
        if arrivals:
            results.append(Simulation(plan, profile, arrivals).run(progress))
    return figures(results, slo, workers, span_s, source.unit_tokens)


def table_of(title: str, first: str, rows: dict[str, Figures]) -> Table:
    """Return a table with one line per fleet."""
    table = Table(title=title)
    columns = (
        "offered/s",
        "goodput/s",
        "in SLO %",
        "refused %",
        "TTFT p50/p99 s",
        "hits of ideal %",
        "p99/mean",
    )
    for column in (first, *columns, "decision µs p50/p99/mean"):
        table.add_column(column, justify="right")
    for name, one in rows.items():
        table.add_row(
            name,
            f"{one.offered:.2f}",
            f"{one.goodput:.2f}",
            f"{100 * one.attainment:.1f}",
            f"{100 * sum(one.refused.values()):.1f}",
            f"{one.ttft_p50_s:.2f} / {one.ttft_p99_s:.2f}",
            f"{100 * one.hits:.1f} of {100 * one.ideal:.1f}" if one.ideal else "-",
            f"{one.balance:.2f}",
            f"{one.cost_p50_us:.0f} / {one.cost_p99_us:.0f} / {one.cost_mean_us:.0f}",
        )
    return table


def cost_table(costs: list[Cost]) -> Table:
    """Return a table of the cost of placing a request, with all workers examined and with a shortlist."""
    table = Table(title="placing a request without the gate, µs CPU")
    for column in ("workers", "all: p50", "mean", "shortlist: p50", "p99", "mean"):
        table.add_column(column, justify="right")
    for one in costs:
        values = (one.whole_p50_us, one.whole_mean_us, one.short_p50_us, one.short_p99_us, one.short_mean_us)
        table.add_row(str(one.workers), *[f"{value:.0f}" for value in values])
    return table


def main(
    azure: Annotated[Path, typer.Option(help="Azure's trace.")] = DATA / "azure_llm_conv_2023_2000.csv",
    mooncake: Annotated[Path, typer.Option(help="Mooncake's trace.")] = DATA / "mooncake_synthetic_500.jsonl",
    sizes: Annotated[str, typer.Option(help="Fleets, workers each, with commas between.")] = SIZES,
    span: Annotated[float, typer.Option(min=1.0, help="Simulated seconds.")] = 20.0,
    load: Annotated[float, typer.Option(min=0.01, help="Multiplies the rate per worker.")] = 1.0,
    slo_ttft: Annotated[float, typer.Option(min=0.01, help="Seconds to the first token.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(min=0.001, help="Seconds between tokens, mean.")] = 0.1,
    variants: Annotated[
        bool, typer.Option(help="Also run one fleet with other views of its workers.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Draw the figures as PNG.")] = None,
) -> None:
    """Run fleets of each size on both traces, then time the placement of requests alone."""
    numbers = [int(size) for size in sizes.split(",") if size.strip().isdecimal() and int(size) > 0]
    if not numbers or len(numbers) != len(sizes.split(",")):
        raise typer.BadParameter(
            f"{sizes!r}: whole numbers above 0 with commas between", param_hint="--sizes"
        )
    sources = [read_source("azure", azure, 1.0), read_source("mooncake", mooncake, MOONCAKE_SCALE)]
    slo, console = SimulatedSlo(slo_ttft, slo_tpot), Console(width=TABLE_WIDTH)
    rows: dict[str, dict[int, Figures]] = {source.name: {} for source in sources}
    varied: dict[str, Figures] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Decisions are timed: a gateway freezes its heap, but here the collector would walk all requests.
    gc.disable()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def fleet(source: Source, variant: Variant, size: int) -> Figures:
            rate = load * RATES[source.name]
            task = bar.add_task(f"{source.name}, {size} workers", total=round(rate * span * size))
            result = run_fleet(
                source,
                variant,
                size,
                rate=rate,
                span_s=span,
                slo=slo,
                seed=seed,
                progress=lambda done: bar.update(task, completed=done) if done % 100 == 0 else None,
            )
            bar.remove_task(task)
            gc.collect()
            return result

        for source in sources:
            for size in numbers:
                usual = Variant("", gateways_for(size), 1.0)
                rows[source.name][size] = fleet(source, usual, size)
        for variant in VARIANTS if variants else ():
            varied[variant.label] = fleet(sources[-1], variant, VARIED)
        costs = [cost_of(size) for size in bar.track(numbers, description="placing")]
    scrape, reading = scrape_us()
    for name, by_size in rows.items():
        title = (
            f"{name}: {load * RATES[name]:g} requests/s a worker, {span:g} s; offered and goodput by worker"
        )
        console.print(table_of(title, "workers", {str(size): one for size, one in by_size.items()}))
    if varied:
        console.print(table_of(f"mooncake, {VARIED} workers", "gateways, scrapes", varied))
    console.print(cost_table(costs))
    console.print(f"a scrape of one worker: {scrape:.0f} µs CPU, {reading:.0f} of them for reading")
    if output is not None:
        report = {
            "slo": asdict(slo),
            "span_s": span,
            "seed": seed,
            "fleets": {name: {size: asdict(one) for size, one in by.items()} for name, by in rows.items()},
            "variants": {name: asdict(one) for name, one in varied.items()},
            "placing": [asdict(one) for one in costs],
            "scrape_us": {"whole": scrape, "reading": reading},
        }
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if plot_to is not None:
        plot(rows, costs, plot_to)


if __name__ == "__main__":
    typer.run(main)
