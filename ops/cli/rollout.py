"""`sluice rollout check`: the rollout checklist asked of a live gateway."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ops.client import DEFAULT_URL, AdminClient, AdminError, Key, Url

rollout = typer.Typer(
    name="rollout",
    help="The rollout checklist, asked of a live gateway.",
    no_args_is_help=True,
)


@rollout.callback()
def _group() -> None:
    """The rollout checklist, asked of a live gateway."""


@rollout.command("check")
def check(
    prometheus: Annotated[str | None, typer.Option(help="Whose rules to look at: http://HOST:9090.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Figures of `sluice replay TRACE --output FILE` over real traffic.")
    ] = None,
    soak: Annotated[Path | None, typer.Option(help="The same of half an hour or more.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The gateway's configuration, for its drain time.")
    ] = None,
    grace: Annotated[
        float | None, typer.Option(min=0, help="Seconds between SIGTERM and SIGKILL where it runs.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Go through the checklist; exit code 1 when a line is wrong.

    What a gateway cannot tell by itself is `by hand`: the line says which file or option answers it. Takes a
    few seconds: every backend generates a few tokens.

    Example: sluice rollout check --prometheus http://127.0.0.1:9090 --replay replay.json --grace 180
    """
    from gateway.config.settings import load_settings
    from ops.cli.startup import start_errors
    from ops.rollout.checks import CheckVerdict, examine
    from ops.rollout.gather import gather

    try:
        drain_s = None if config is None else load_settings(config).server.drain_seconds
        findings = examine(
            gather(
                AdminClient(url, key),
                prometheus=prometheus,
                replay=replay,
                soak=soak,
                drain_s=drain_s,
                grace_s=grace,
            )
        )
    except AdminError as error:
        print(f"sluice: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except Exception as error:
        reported = [str(fault) for fault in start_errors(error)]
        if not reported:
            raise
        print("\n".join(f"sluice: {line}" for line in reported), file=sys.stderr)
        raise typer.Exit(2) from None

    wrong = sum(finding.verdict is CheckVerdict.WRONG for finding in findings)
    if as_json:
        checks = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": not wrong, "checks": checks}, ensure_ascii=False, indent=2))
        raise typer.Exit(1 if wrong else 0)
    from ops.cli.console import screen, table_of

    colours = {CheckVerdict.OK: "green", CheckVerdict.WRONG: "red", CheckVerdict.BY_HAND: "yellow"}
    table = table_of("", "check", "found", "what to do")
    for finding in findings:
        colour = colours[finding.verdict]
        table.add_row(f"[{colour}]{finding.verdict}[/]", finding.check, finding.found, finding.hint)
    console = screen()
    console.print(table)
    by_hand = sum(finding.verdict is CheckVerdict.BY_HAND for finding in findings)
    console.print(f"{len(findings) - wrong - by_hand} ok, {wrong} wrong, {by_hand} by hand.")
    raise typer.Exit(1 if wrong else 0)
