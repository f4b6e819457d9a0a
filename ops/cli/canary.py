"""`sluice canary`: shifts a route to a backend step by step, and rolls back when the backend is worse."""

from typing import Annotated, Any

import typer

from ops.cli.console import print_lines, print_rows
from ops.cli.operator import Backend, Change, Comment, Operator, Route, command_group, operator_command
from ops.cli.routes import print_changes
from ops.client import AdminError

AT = ("admin", "canary")

canary = command_group(
    "canary", "Shift a route to a backend step by step; rolled back automatically when it is worse."
)


@operator_command(canary, "start")
def start(
    gateway: Operator,
    route: Route,
    backend: Backend,
    steps: Annotated[str, typer.Option(help="Increasing percentages; the last is 100.")] = "5,25,50,100",
    min_samples: Annotated[int, typer.Option(min=1, help="Least requests on each side in a step.")] = 200,
    step_seconds: Annotated[float, typer.Option(min=0, help="Shortest time of a step.")] = 60,
    window_seconds: Annotated[
        float, typer.Option(min=1, max=60, help="Seconds of requests that are compared at a time.")
    ] = 5,
    force: Annotated[
        bool, typer.Option("--force", help="Start without the evaluation that the route requires; audited.")
    ] = False,
    *,
    change: Change,
) -> None:
    """Start a canary with its first step. Asks first at a terminal.

    Example: sluice canary start self_hosted_generation bedrock -m "new pool"
    """
    try:
        percents = [float(part) for part in steps.split(",")]
    except ValueError:
        raise AdminError(f"--steps: given {steps!r}; allowed: percents, as in 5,25,50,100") from None
    change.confirm(f"give {backend} {percents[0]:g} % of {route} now, and more automatically?")
    _post(
        gateway, "start", route=route, backend=backend, steps=percents, min_samples=min_samples,
        step_seconds=step_seconds, window_seconds=window_seconds, force=force, **change.body,
    )  # fmt: skip


@operator_command(canary, "status")
def status(gateway: Operator) -> None:
    """Show the last canary: its step, its figures, and the reason for its end."""
    gateway.show(gateway.get(*AT), _print)


@operator_command(canary, "pause")
def pause(gateway: Operator, comment: Comment = "") -> None:
    """Pause the canary: its share stays, and it is neither judged nor rolled back until it is resumed."""
    _post(gateway, "pause", comment=comment)


@operator_command(canary, "resume")
def resume(gateway: Operator, comment: Comment = "") -> None:
    """Resume the canary in the step in which it was paused."""
    _post(gateway, "resume", comment=comment)


@operator_command(canary, "abort")
def abort(gateway: Operator, change: Change) -> None:
    """End the canary and restore the route's earlier weights. Asks first at a terminal."""
    change.confirm("end the canary and restore the earlier weights?")
    _post(gateway, "abort", **change.body)


def _post(gateway: Operator, word: str, **body: Any) -> None:
    gateway.show(gateway.post(*AT, word, **body), _print, has=("canary",))


def _print(found: Any) -> None:
    one = found["canary"]
    if found.get("dry_run"):
        print_changes(found["changes"])
        print("valid; nothing was changed")
        return
    if one is None:
        print("there has been no canary yet")
        return
    heading = f"{one['id']}: {one['backend']} on {one['route']}: {one['phase']}"
    if one["percent"] is not None:
        heading += f" at {one['percent']:g} %"
    lines = (
        f"{heading} (step {one['step']} of {', '.join(f'{step:g}' for step in one['steps'])})",
        one["reason"],
        f"waits for {one['waiting_for']}" if one["waiting_for"] else "",
    )
    print_lines(*filter(None, lines))
    headings = ("check", "canary: failed", "of", "baseline: failed", "of", "evidence", "rolled back at")
    counts, powers = ("canary_bad", "canary", "baseline_bad", "baseline"), ("log10_e", "log10_bound")
    rows = (
        (check, *(seen[name] for name in counts), *(f"1e{seen[name]:g}" for name in powers))
        for check, seen in one["checks"].items()
    )
    print_rows(headings, rows)
