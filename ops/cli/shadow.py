"""`sluice shadow`: how shadowed requests compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.cli.console import screen
from ops.cli.operator import Operator, operator_command, print_json, print_lines
from ops.client import AdminError

shadow = typer.Typer(
    name="shadow", help="How another backend would have answered: compare it.", no_args_is_help=True
)


@shadow.callback()
def _group() -> None:
    """How another backend would have answered: compare it."""


@operator_command(shadow, "report")
def report(
    gateway: Operator,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The newest pairs.")] = 1_000,
    route: Annotated[str | None, typer.Option(help="Of one route alone.")] = None,
    since: Annotated[float | None, typer.Option(help="Unix seconds.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots here too.")] = None,
) -> None:
    """Compare the newest pairs: checks, times, costs, likeness; by prompt version, adapter and intent.

    Example: sluice shadow report --route self_hosted_generation --html shadow.html
    """
    query: dict[str, str | int] = {"limit": limit}
    if route is not None:
        query["route"] = route
    if since is not None:
        query["since"] = f"{since:.3f}"
    try:
        found = gateway.get("admin", "shadow", query=query)
        if html is not None:
            from ops.shadow.page import page

            html.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise AdminError(str(error)) from None
    show(found, as_json=gateway.as_json)
    if html is not None:
        print(f"written: {html}", file=sys.stderr)


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """Print a report as tables, or as JSON."""
    if as_json:
        print_json(found)
        return
    if not found["pairs"]:
        print("no pairs yet: give a route `shadow: {backend, sample}`")
        return
    from ops.shadow.tables import lines, tables

    console = screen()
    print_lines(console, *lines(found))
    for table in tables(found):
        console.print(table)
