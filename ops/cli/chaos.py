"""``sluice chaos SCENARIO``: injects faults under load. Large modules are imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.console import screen, write_figures
from ops.cli.operator import AsJson, Key, Url
from ops.cli.startup import need_modules, one_line_errors
from ops.client import DEFAULT_URL

if TYPE_CHECKING:
    from rich.console import Console

    from ops.chaos.report import ChaosReport
    from ops.chaos.scenario import Scenario

EXIT_WRONG = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

HELP = """
Inject faults while callers are served; report the outcome of each request.

SCENARIO is a YAML file: what is asked, what breaks and when; or the name
of one that ships with Sluice (engine-kill, engine-stop, worker-kill, nan,
oom, soak and others; docs/chaos.md). First each question is asked
undisturbed; then N streams and not-streamed requests run while the
faults happen; every answer is compared with the undisturbed one.

With --start the tool starts its own gateway (engine, workers and a
stand-in for Bedrock, as the scenario says) and breaks that. Without it,
it speaks to --url: a gateway with chaos.enabled: true takes injected
faults; its processes can be killed when --pid names it on this machine.

\b
Examples
  sluice chaos engine-kill --start
  sluice chaos nan.yaml --url http://127.0.0.1:8000 --key KEY

\b
Verdicts
  whole     the undisturbed answer        partial  a beginning, and an end that says so
  resumed   broken, and whole all the same  error    a clean error before anything came
  fallback  a whole answer of another leg   lost     no end at all
  degraded  the route's degraded text       wrong    not the right text, or billed wrong

Exit code: 0; 1 when a request was lost or wrong, had a verdict that the
scenario does not allow, or something is left over; 2 when the run could
not be made; 130 after Ctrl-C or SIGTERM.
"""


def chaos(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="The YAML file, or a bundled scenario's name.")
    ],
    start: Annotated[
        bool, typer.Option("--start", help="Start what the scenario names, and break that.")
    ] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    pid: Annotated[
        int | None, typer.Option(help="The gateway's process, to break it and its engine.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="The gateway's SQLite ledger, to check what was billed.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="The gateway's log in JSON, to see where seams are.")
    ] = None,
    streams: Annotated[int | None, typer.Option(help="Instead of the scenario's load.streams.")] = None,
    for_s: Annotated[float | None, typer.Option(help="Instead of the scenario's load.for_s.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's random.seed.")] = None,
    every: Annotated[bool, typer.Option("--every", help="Show every request, however many.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the report to this file as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Inject faults while callers are served; report the outcome of each request."""
    from ops.chaos.scenario import ChaosError, load_scenario
    from ops.chaos.show import tables

    console = screen(stderr=as_json)
    with one_line_errors(ChaosError, code=EXIT_USAGE):
        need_modules("aiohttp", extra="replay")
        from ops.chaos.testbed import Testbed

        wanted = _changed(load_scenario(scenario), streams, for_s, seed)
        report = _run(
            wanted, None if start else Testbed(url, key, gateway_pid=pid, ledger=ledger, log=log), console
        )
    console.print(tables(report, every=every))
    write_figures(report.as_json(), output, as_json=as_json)
    if not report.ok:
        raise typer.Exit(EXIT_WRONG)


chaos.__doc__ = HELP


def _changed(scenario: Scenario, streams: int | None, for_s: float | None, seed: int | None) -> Scenario:
    """The scenario with the overrides of the command line. Raises ChaosError."""
    from pydantic import ValidationError

    from gateway.config.yaml_file import explain
    from ops.chaos.scenario import Scenario, ScenarioError

    data = scenario.model_dump()
    if streams is not None:
        data["load"]["streams"] = streams
    if for_s is not None:
        data["load"]["for_s"] = for_s
    if seed is not None and data["random"] is not None:
        data["random"]["seed"] = seed
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise ScenarioError(explain(error, Scenario, lambda loc: "given here")) from None


def _run(scenario: Scenario, testbed: object, console: Console) -> ChaosReport:
    import asyncio
    import signal
    import tempfile
    from contextlib import AsyncExitStack
    from functools import partial

    from ops.chaos.run import ChaosRun
    from ops.chaos.show import progress
    from ops.chaos.testbed import Testbed, started

    watch = partial(progress, console)

    async def main() -> ChaosReport:
        # SIGTERM cancels, like Ctrl-C: the children are in sessions of their own and must be ended here.
        whole = asyncio.current_task()
        assert whole is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, whole.cancel)
        if isinstance(testbed, Testbed):
            return await ChaosRun(scenario, testbed, watch=watch).go()
        async with AsyncExitStack() as running:
            folder = running.enter_context(tempfile.TemporaryDirectory(prefix="sluice-chaos-"))
            with console.status("starting…"):
                own = await running.enter_async_context(started(scenario.start, Path(folder)))
            return await ChaosRun(scenario, own, watch=watch).go()

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise typer.Exit(EXIT_INTERRUPTED) from None
