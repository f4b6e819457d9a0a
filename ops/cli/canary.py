"""`sluice canary`: a backend gets a route step by step, and loses it again when it is worse."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from ops.cli.console import screen, table_of
from ops.cli.routes import DryRun, print_changes
from ops.client import DEFAULT_URL, AdminClient, AdminError, AsJson, Key, Url

AT = ("admin", "canary")

canary = typer.Typer(
    name="canary",
    help="Give a backend a route step by step; it is rolled back by itself when it is worse.",
    no_args_is_help=True,
)

Message = Annotated[str, typer.Option("--message", "-m", help="Why; kept in the audit log.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@canary.command("start")
def start(
    route: Annotated[str, typer.Argument(metavar="ROUTE", help="A route's name.")],
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help="The backend that shall have it.")],
    steps: Annotated[str, typer.Option(help="Rising percents, the last 100.")] = "5,25,50,100",
    min_samples: Annotated[int, typer.Option(min=1, help="Requests of each side in a step.")] = 200,
    step_seconds: Annotated[float, typer.Option(min=0, help="Shortest time of a step.")] = 60,
    window_seconds: Annotated[float, typer.Option(min=1, max=60, help="What is compared at once.")] = 5,
    message: Message = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Begin with the first step. Asks first at a terminal.

    Example: sluice canary start self_hosted_generation bedrock -m "new pool"
    """
    with _told():
        try:
            percents = [float(part) for part in steps.split(",")]
        except ValueError:
            raise AdminError(f"--steps: given {steps!r}; allowed: percents, as in 5,25,50,100") from None
        _confirm(f"give {backend} {percents[0]:g} % of {route} now, and more by itself?", yes or dry_run)
        body = {
            "route": route,
            "backend": backend,
            "steps": percents,
            "min_samples": min_samples,
            "step_seconds": step_seconds,
            "window_seconds": window_seconds,
            "dry_run": dry_run,
        }
        _print(_post(url, key, "start", message, **body), as_json)


@canary.command("status")
def status(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show the last canary: its step, its figures, and why it ended."""
    with _told():
        _print(AdminClient(url, key).get(*AT), as_json)


@canary.command("pause")
def pause(message: Message = "", url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Leave it at its share; nothing is judged, and nothing rolled back, until it is resumed."""
    with _told():
        _print(_post(url, key, "pause", message), as_json)


@canary.command("resume")
def resume(message: Message = "", url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Go on with the step it was paused in."""
    with _told():
        _print(_post(url, key, "resume", message), as_json)


@canary.command("abort")
def abort(
    message: Message = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """End it; the route has the weights from before. Asks first at a terminal."""
    with _told():
        _confirm("end the canary and give its sessions back?", yes or dry_run)
        _print(_post(url, key, "abort", message, dry_run=dry_run), as_json)


def _post(url: str, key: str | None, word: str, message: str, **body: Any) -> Any:
    return AdminClient(url, key).post(*AT, word, body=json.dumps({**body, "comment": message}).encode())


def _confirm(question: str, yes: bool) -> None:
    if sys.stdin.isatty() and not yes:
        typer.confirm(question, abort=True, err=True)


@contextmanager
def _told() -> Iterator[None]:
    """What the gateway refuses becomes lines on standard error and exit code 1."""
    try:
        yield
    except AdminError as error:
        print(f"sluice: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _print(found: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
        return
    one = found["canary"]
    if found.get("dry_run"):
        print_changes(screen(), found["changes"])
        print("valid; nothing was changed")
        return
    if one is None:
        print("there was no canary yet")
        return
    from rich.markup import escape

    console = screen()
    told = f"{one['id']}: {one['backend']} on {one['route']}: {one['phase']}"
    if one["percent"] is not None:
        told += f" at {one['percent']:g} %"
    for line in (
        f"{told} (step {one['step']} of {', '.join(f'{step:g}' for step in one['steps'])})",
        one["reason"],
        f"waits for {one['waiting_for']}" if one["waiting_for"] else "",
    ):
        if line:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    table = table_of("check", "canary: bad", "of", "baseline: bad", "of", "evidence", "rolled back at")
    for check, seen in one["checks"].items():
        numbers = (seen[name] for name in ("canary_bad", "canary", "baseline_bad", "baseline"))
        powers = (f"1e{seen[name]:g}" for name in ("log10_e", "log10_bound"))
        table.add_row(escape(check), *map(str, numbers), *powers)
    console.print(table)
