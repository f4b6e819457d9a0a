"""The command of the benchmark: ``python -m benchmarks.forwarding --help``."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.forwarding.gateways import Name, NotAvailable
from benchmarks.forwarding.plot import draw
from benchmarks.forwarding.processes import Broken, Cores
from benchmarks.forwarding.report import Report, machine, markdown, print_report
from benchmarks.forwarding.rounds import LOADS, Plan, Turn, run_all

# A smoke run leaves out the gateways that have to be installed first.
INSTALLED = {Name.LITELLM, Name.TENSORZERO, Name.VLLM_ROUTER}
QUICK = tuple(name for name in Name if name not in INSTALLED)
QUICK_SECONDS, QUICK_WARM_UP_S = 1.0, 0.5
# Redraws of the progress bar per second; more would take CPU from the load generator's core.
REDRAWS_PER_S = 1.0


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def main(
    only: Annotated[
        str | None,
        typer.Option(help=f"Gateways, with commas: {', '.join(Name)}. No gateway is always measured."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each gateway has one turn in each.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each load is measured.")] = 10.0,
    quick: Annotated[
        bool, typer.Option(help="A smoke run of a minute: one round, nothing is installed for it.")
    ] = False,
    agents: Annotated[
        bool, typer.Option(help="Prompts of agents: 10 tools, 20 calls with their results, 45 KB.")
    ] = False,
    realtime: Annotated[
        bool, typer.Option(help="Go before all else on the machine (chrt, needs root): if it is not quiet.")
    ] = False,
    python: Annotated[
        str, typer.Option(help="The Python that runs Sluice and the bare proxy; the benchmark's by default.")
    ] = sys.executable,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the table.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Also write that JSON object to this file.")] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Also print the table as Markdown.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a PNG, one plot for each limit (needs matplotlib).")
    ] = None,
    saved: Annotated[
        Path | None, typer.Option(help="Show the report that --output wrote there; nothing is measured.")
    ] = None,
) -> None:
    """What one request and one streamed token cost in Sluice and in other gateways, in one run.

    One gateway process runs on one core, in turn; a fake worker and the load generator on another (two cores
    are needed, Linux, and taskset). Prompts have 8 KB, answers 140 tokens, and every answer is checked. nginx
    must be installed (apt-get install nginx); LiteLLM, TensorZero and vllm-router are installed from PyPI
    into environments of their own under ~/.cache/sluice-benchmarks when they are first measured.

    Compare ratios, on a quiet machine. "Added" is relative to no gateway under the same load in the same
    round; the row of no gateway has its own times. "Paced": 64 streams, each token in its own write, 10 ms
    apart; "unpaced": as fast as the worker writes.

    Example: python -m benchmarks.forwarding --only nginx,sluice --rounds 1
    """
    console, errors = Console(width=150 if not Console().is_terminal else None), Console(stderr=True)
    if saved is not None:
        report = Report.saved(json.loads(saved.read_text()))
    else:
        names = _names(only, QUICK if quick else tuple(Name))
        plan = Plan(
            names=names,
            rounds=1 if quick else rounds,
            seconds=QUICK_SECONDS if quick else seconds,
            warm_up_s=QUICK_WARM_UP_S if quick else 2.0,
            python=python,
            agents=agents,
        )
        turns = _measured(plan, errors, realtime=realtime)
        said = f"{machine(python)}; {plan.rounds} rounds of {plan.seconds:g} s a load, medians"
        said += ", prompts of agents" if agents else ""
        said += ", real-time" if realtime else ""
        report = Report.of(turns, said)
    written = json.dumps(asdict(report), indent=1)
    if output is not None:
        output.write_text(written + "\n")
    if as_json:
        print(written)
    else:
        print_report(console, report)
    if as_markdown:
        print(markdown(report))
    if plot is not None:
        draw(plot, report)


def _measured(plan: Plan, errors: Console, *, realtime: bool) -> list[Turn]:
    # So that SIGTERM also ends the processes that were started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with Progress(
            TextColumn("{task.description:<60}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=errors, refresh_per_second=REDRAWS_PER_S, transient=True,
        ) as bar:  # fmt: skip
            task = bar.add_task("starting", total=plan.rounds * len(plan.names) * len(LOADS))
            return run_all(
                plan,
                Cores.here(realtime=realtime),
                lambda what: bar.update(task, description=what, advance=1),
            )
    except (Broken, NotAvailable) as error:
        errors.print(f"forwarding: {error}", style="red", highlight=False)
        raise typer.Exit(1) from None


def _names(only: str | None, default: tuple[Name, ...]) -> tuple[Name, ...]:
    if only is None:
        return default
    asked = [one.strip() for one in only.split(",")]
    unknown = [one for one in asked if one not in set(Name)]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}; there are: {', '.join(Name)}", param_hint="--only")
    # In the table's order; without the row of no gateway, nothing could be reported as added.
    return tuple(name for name in Name if name in asked or name is Name.DIRECT)


if __name__ == "__main__":
    app()
