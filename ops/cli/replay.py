"""``sluice replay TRACE``: replays a trace as load. Large modules are imported only when it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.console import check_folder, plain, screen, write_figures
from ops.cli.interrupts import INTERRUPTED
from ops.cli.operator import AsJson, with_options
from ops.cli.startup import need_modules
from ops.replay.options import Options, ReplayError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from ops.replay.load import ReplayRun
    from ops.replay.session import Replayed

EXIT_ERRORS = 1
EXIT_USAGE = 2


@with_options(ReplayError, OSError, code=EXIT_USAGE)
def replay(
    options: Options,
    max_errors: Annotated[
        int, typer.Option(min=0, help="Failed requests up to this number give exit code 0.")
    ] = 0,
    as_batch: Annotated[
        Path | None,
        typer.Option(help="Write the requests to this file for `sluice batch submit`, and send none."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG file.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the figures to this file as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace against a gateway; print latencies, throughput and goodput.

    TRACE is Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or
    Mooncake's JSON lines. Requests are sent at the times of the trace, whether or
    not earlier ones were answered. Prompts are random words of the trace's
    lengths, the same for the same --seed. All answers are streamed, so TTFT
    is measured as a client sees it.

    Latencies count from sending. The time for which --concurrency holds a
    request back is reported separately, as client-side delay.

    \b
    Example: the first 200 rows, twice as fast, at a tenth of the lengths
      sluice replay benchmarks/data/azure_llm_conv_2023_2000.csv \\
          --limit 200 --speed 2 --scale-tokens 0.1 --plot replay.png

    Exit code: 0; 1 when more than --max-errors requests failed; 2 when it
    could not start; 130 after Ctrl-C (ended requests are still reported).
    """
    need_modules("aiohttp", *(("matplotlib",) if plot is not None else ()), extra="replay")
    from ops.replay.report import figures_of
    from ops.replay.show import tables

    console = screen(stderr=as_json)
    for name, file in (("--plot", plot), ("--output", output), ("--as-batch", as_batch)):
        check_folder(name, file)
    if as_batch is not None:
        from ops.replay.session import write_batch

        count, cut = asyncio.run(write_batch(options, as_batch))
        console.print(
            f"{count} requests in {plain(as_batch)}, {cut} of them cut to the model's length; "
            f"sluice batch submit {plain(as_batch)} runs them",
            highlight=False,
        )
        return
    done = _run(options, console)
    notes = _notes(options, done)
    console.print(tables(done.report, notes))
    write_figures(figures_of(done.report, done.setup(options)), output, as_json=as_json)
    if plot is not None:
        from ops.replay.plot import draw

        rows = f"{done.report.run.sent:,} requests in {done.report.run.wall_s:,.0f} s"
        subtitle = f"{rows}  ·  {notes['scale']}  ·  {notes['prompts']}"
        draw(plot, done.report, title=f"Replay of {options.trace.name}", subtitle=subtitle)
        console.print(f"plot: {plain(plot)}", highlight=False)
    if done.report.run.interrupted:
        raise typer.Exit(INTERRUPTED)
    if done.report.error_count > max_errors:
        raise typer.Exit(EXIT_ERRORS)


def _run(options: Options, console: Console) -> Replayed:
    import signal
    from contextlib import contextmanager

    import uvloop

    from ops.replay.session import replay_trace
    from ops.replay.show import progress

    async def main() -> Replayed:
        stop = asyncio.Event()

        @contextmanager
        def watch(run: ReplayRun, total: int) -> Iterator[None]:
            # Only from now on: Ctrl-C before the load ends the command, since there are no figures yet.
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
            with progress(console, run, total):
                yield

        return await replay_trace(options, stop=stop, watch=watch)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _notes(options: Options, done: Replayed) -> dict[str, str]:
    trace, lexicon = done.trace, done.lexicon
    rows = f"{len(trace.arrivals):,} rows over {trace.span_s:,.1f} s"
    lengths = f"{done.report.clamped:,} shortened to the model's {done.max_model_len:,} tokens"
    measured = f"measured with /tokenize; system prompt and template add {lexicon.overhead} tokens"
    measured += f", so {done.below_overhead:,} are longer than in the trace" if done.below_overhead else ""
    return {
        "trace": f"{trace.path} ({trace.format}, {rows})",
        "gateway": f"{options.url}, {options.contract.value} contract",
        "scale": f"time / {options.speed:g}, lengths x {options.scale_tokens:g}",
        "prompts": f"{measured if lexicon.calibrated else 'lengths estimated: no /tokenize'}; {lengths}",
    }
