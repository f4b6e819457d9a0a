"""`sluice shadow`: how shadowed requests compare."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.cli.console import screen
from ops.client import DEFAULT_URL, AdminClient, AdminError, AsJson, Key, Url

shadow = typer.Typer(
    name="shadow", help="How another backend would have answered: compare it.", no_args_is_help=True
)


@shadow.callback()
def _group() -> None:
    """How another backend would have answered: compare it."""


@shadow.command("report")
def report(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The newest pairs.")] = 1_000,
    route: Annotated[str | None, typer.Option(help="Of one route alone.")] = None,
    since: Annotated[float | None, typer.Option(help="Unix seconds.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots here too.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
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
        found = AdminClient(url, key).get("admin", "shadow", query=query)
        if html is not None:
            from gateway.shadow.page import page

            html.write_text(page(found), encoding="utf-8")
    except (AdminError, OSError) as error:
        print(f"sluice: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    show(found, as_json=as_json)
    if html is not None:
        print(f"written: {html}", file=sys.stderr)


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """Print a report as tables, or as JSON."""
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
        return
    if not found["pairs"]:
        print("no pairs yet: give a route `shadow: {backend, sample}`")
        return
    from gateway.shadow.tables import lines, tables

    console = screen()
    for line in lines(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for table in tables(found):
        console.print(table)
