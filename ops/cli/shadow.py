"""`sluice shadow`: compares the two answers of shadowed requests."""

from typing import Annotated, Any

import typer

from ops.cli.console import plain, print_lines, print_rows
from ops.cli.operator import Operator, command_group, given, operator_command
from ops.shadow.tables import HEADER, lines, rows, title

shadow = command_group("shadow", "Compare the answers of a shadow backend with those that callers got.")


@operator_command(shadow, "report")
def report(
    gateway: Operator,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Number of pairs, newest first.")] = 1_000,
    route: Annotated[str | None, typer.Option(help="Only pairs of this route.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only pairs from this time on: a day (UTC), ISO 8601 or Unix seconds.")
    ] = None,
) -> None:
    """Compare the newest pairs by checks, times and costs, per shadow, prompt version, adapter, intent.

    Example: sluice shadow report --route self_hosted_generation
    """
    query = given(limit=limit, route=route, since=since)
    gateway.show(gateway.get("admin", "shadow", query=query), print_report)


def print_report(found: Any) -> None:
    if not found["pairs"]:
        print("no pairs yet: set `shadow: {backend, sample}` in a route")
        return
    print_lines(*lines(found))
    for group in found["groups"]:
        print_rows(HEADER, rows(group), right=HEADER[1:], title=plain(title(group)), title_justify="left")
