"""``sluice chaos SCENARIO``: faults on purpose under load. Nothing heavy is imported until it runs."""

from __future__ import annotations

import json as stdlib_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ops.chaos.report import ChaosReport
    from ops.chaos.scenario import Scenario

EXIT_WRONG = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

HELP = """
Break things while callers are served; tell what became of each request.

SCENARIO is a YAML file: what is asked, what breaks and when; or the name
of one that ships with Sluice (engine-kill, engine-stop, worker-kill, nan,
oom, soak and others; docs/chaos.md). First each question is asked
undisturbed; then N streams and not-streamed requests run while the
faults happen; every answer is held against the undisturbed one.

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
    url: Annotated[str, typer.Option(envvar="SLUICE_URL", help="The gateway.")] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None, typer.Option(envvar="SLUICE_ADMIN_KEY", show_envvar=True, help="An admin's key, if any.")
    ] = None,
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
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Break things while callers are served; tell what became of each request."""
    from rich.console import Console

    from ops.chaos.errors import ChaosError
    from ops.cli.console import screen

    console = Console(stderr=True) if json else screen()
    problems = Console(stderr=True)
    try:
        _need_extras()
        from ops.chaos.scenario import load_scenario
        from ops.chaos.testbed import Testbed

        wanted = _changed(load_scenario(scenario), streams, for_s, seed)
        report = _run(
            wanted, None if start else Testbed(url, key, gateway_pid=pid, ledger=ledger, log=log), console
        )
    except ChaosError as error:
        problems.print(f"[bold red]chaos:[/] {_escaped(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_USAGE) from error

    from ops.chaos.show import tables

    console.print(tables(report, every=every))
    reported = stdlib_json.dumps(report.as_json(), indent=2, ensure_ascii=False)
    if json:
        typer.echo(reported)
    if output is not None:
        output.write_text(reported + "\n", encoding="utf-8")
    if not report.ok:
        raise typer.Exit(EXIT_WRONG)


chaos.__doc__ = HELP


def _need_extras() -> None:
    """Raises ChaosError, naming what to install."""
    from importlib.util import find_spec

    from ops.chaos.errors import ChaosError

    if find_spec("aiohttp") is None:
        raise ChaosError("aiohttp is not installed; install sluice-gateway[replay]")


def _changed(scenario: Scenario, streams: int | None, for_s: float | None, seed: int | None) -> Scenario:
    """The scenario with what the command line says instead. Raises ChaosError."""
    from pydantic import ValidationError

    from ops.chaos.errors import ScenarioError
    from ops.chaos.scenario import Scenario

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
        first = error.errors(include_url=False)[0]
        raise ScenarioError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _run(scenario: Scenario, testbed: object, console: Console) -> ChaosReport:
    import asyncio
    import signal
    import tempfile
    from contextlib import AbstractContextManager, AsyncExitStack

    from ops.chaos.run import ChaosRun
    from ops.chaos.show import progress
    from ops.chaos.testbed import Testbed, started

    def watch(run: ChaosRun) -> AbstractContextManager[None]:
        return progress(console, run)

    async def main() -> ChaosReport:
        # As Ctrl-C: what was started has sessions of its own and must be ended from here.
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


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
