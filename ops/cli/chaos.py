"""``sluice chaos SCENARIO``: injects faults under load. Large modules are imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.chaos.errors import ChaosError
from ops.cli.console import check_folder, screen, write_figures
from ops.cli.interrupts import INTERRUPTED
from ops.cli.operator import Operator, given, with_options
from ops.cli.startup import need_modules

if TYPE_CHECKING:
    from rich.console import Console

    from ops.chaos.report import ChaosReport
    from ops.chaos.scenario import Scenario
    from ops.chaos.testbed import Testbed

EXIT_WRONG = 1
EXIT_USAGE = 2


@with_options(ChaosError, code=EXIT_USAGE)
def chaos(
    gateway: Operator,
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="The YAML file, or a bundled scenario's name.")
    ],
    start: Annotated[
        bool,
        typer.Option(
            "--start", help="Start the processes that the scenario names, and inject faults into them."
        ),
    ] = False,
    pid: Annotated[
        int | None, typer.Option(help="Process id of the gateway, to kill or stop it and its engine.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="The gateway's SQLite ledger, to check the billed tokens.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="The gateway's log in JSON, to find where answers were resumed.")
    ] = None,
    streams: Annotated[int | None, typer.Option(help="Instead of the scenario's load.streams.")] = None,
    for_s: Annotated[float | None, typer.Option(help="Instead of the scenario's load.for_s.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's random.seed.")] = None,
    every: Annotated[bool, typer.Option("--every", help="Show every request in the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the report to this file as JSON.")] = None,
) -> None:
    """Inject faults while requests are served; report the outcome of each one.

    SCENARIO is a YAML file with the requests and the faults; or the name
    of one that ships with Sluice (engine-kill, engine-stop, worker-kill, nan,
    oom, soak and others; docs/chaos.md). First each request is sent without
    faults; then N streams and unstreamed requests run while faults are
    injected. Each answer is compared with the one without faults.

    With --start the command starts its own gateway (engine, workers and a
    stand-in for Bedrock, as in the scenario). Without it, it uses --url: a
    gateway with chaos.enabled: true accepts injected faults; its processes
    can be killed if it runs on this machine and --pid is given.

    \b
    Examples
      sluice chaos engine-kill --start
      sluice chaos nan.yaml --url http://127.0.0.1:8000 --key KEY

    \b
    Verdicts
      whole     the answer without faults
      resumed   interrupted, but complete
      fallback  a whole answer from a fallback target
      degraded  the route's degraded text
      partial   incomplete, and reported as such
      error     an error before any output
      lost      no end
      wrong     wrong text, or billed wrong

    Exit code: 0; 1 when a request was lost or wrong, had a verdict that the
    scenario does not allow, or resources were not released; 2 when the run
    could not start; 130 after Ctrl-C or SIGTERM.
    """
    need_modules("aiohttp", extra="replay")
    from ops.chaos.scenario import load_scenario
    from ops.chaos.show import tables

    console = screen(stderr=gateway.as_json)
    running = _gateway_at(gateway, start=start, pid=pid, ledger=ledger, log=log)
    check_folder("--output", output)
    wanted = _changed(load_scenario(scenario), streams, for_s, seed)
    report = _run(wanted, running, console)
    console.print(tables(report, every=every))
    write_figures(report.as_json(), output, as_json=gateway.as_json)
    if not report.ok:
        raise typer.Exit(EXIT_WRONG)


def _gateway_at(
    gateway: Operator, *, start: bool, pid: int | None, ledger: Path | None, log: Path | None
) -> Testbed | None:
    """The gateway at --url; ``None``: the scenario's own is started. Raises ChaosError."""
    from ops.chaos.processes import check_gateway
    from ops.chaos.testbed import Testbed

    unused = [f"--{name}" for name in given(pid=pid, ledger=ledger, log=log)] if start else []
    if unused:
        raise ChaosError(f"{unused[0]}: --start starts a gateway of its own; allowed without --start")
    if start:
        return None
    if pid is not None:
        check_gateway(pid, gateway.url)
    return Testbed(gateway.url, gateway.key, gateway_pid=pid, ledger=ledger, log=log)


def _changed(scenario: Scenario, streams: int | None, for_s: float | None, seed: int | None) -> Scenario:
    """The scenario with the overrides of the command line. Raises ChaosError."""
    from pydantic import ValidationError

    from gateway.config.yaml_file import explain
    from ops.chaos.scenario import Scenario

    data = scenario.model_dump()
    data["load"] |= given(streams=streams, for_s=for_s)
    if data["random"] is not None:
        data["random"] |= given(seed=seed)
    elif seed is not None:
        raise ChaosError("--seed: the scenario has no random faults")
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise ChaosError(explain(error, Scenario, lambda loc: "given here")) from None


def _run(scenario: Scenario, testbed: Testbed | None, console: Console) -> ChaosReport:
    import asyncio
    import signal
    import tempfile
    from contextlib import AsyncExitStack
    from functools import partial

    from ops.chaos.run import ChaosRun
    from ops.chaos.show import progress
    from ops.chaos.testbed import started

    async def main() -> ChaosReport:
        # SIGTERM cancels, like Ctrl-C: the children are in sessions of their own and must be ended here.
        whole = asyncio.current_task()
        assert whole is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, whole.cancel)
        async with AsyncExitStack() as running:
            own = testbed
            if own is None:
                folder = running.enter_context(tempfile.TemporaryDirectory(prefix="sluice-chaos-"))
                with console.status("starting…"):
                    own = await running.enter_async_context(started(scenario.start, Path(folder)))
            return await ChaosRun(scenario, own, watch=partial(progress, console)).go()

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise typer.Exit(INTERRUPTED) from None
