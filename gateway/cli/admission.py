"""`sluice admission`: who waits for which backend, what holds them, what was decided last."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from gateway.cli.client import DEFAULT_URL, AdminClient, AdminError, AsJson, Key, Url

# Decisions that fit a screen; --json shows all that the gateway keeps.
SHOWN_DECISIONS = 15

admission = typer.Typer(
    name="admission", help="Who waits for which backend, and what was decided last.", no_args_is_help=True
)


@admission.callback()
def words() -> None:
    """Keeps ``show`` a word of its own while it is the only one."""


@admission.command("show")
def show(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show queues, limits, forecasts and the last decisions.

    Example: sluice admission show --url http://127.0.0.1:8000 --json
    """
    try:
        found = AdminClient(url, key).get("admin", "admission")
    except AdminError as error:
        print(f"sluice: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        _print(found)


def _print(found: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not found["backends"]:
        console.print("No request has come to any backend yet.")
        return
    gates = Table(
        "backend", "waiting", "held by", "in flight", "memory", "forecast", "rung", "circuit", "held ms"
    )
    for name, gate in found["backends"].items():
        queue, flight, memory = gate["queue"], gate["in_flight"], gate["memory"]
        classes = " ".join(f"{word} {count}" for word, count in queue["classes"].items() if count)
        gates.add_row(
            name,
            f"{queue['requests']} ({classes})" if classes else "0",
            queue["held_by"] or "",
            f"{flight['sequences']} of {flight['limit']}",
            f"{memory['used']:.0%}",
            f"{memory['forecast']:.0%}",
            str(gate["ladder"]["rung"]),
            gate["circuit"]["state"],
            f"{gate['rates']['held_ms']:,.0f}",
        )
    console.print(gates)
    waiting = Table("backend", "class", "tenant", "waiting")
    for name, gate in found["backends"].items():
        for one in gate["queue"]["tenants"]:
            waiting.add_row(name, one["class"], one["tenant"], str(one["requests"]))
    if waiting.row_count:
        console.print(waiting)
    last = Table("at", "backend", "class", "tenant", "decision", "wait ms", title="last decisions")
    for one in found["decisions"][:SHOWN_DECISIONS]:
        refused = one["decision"] == "refused"
        wait = one["estimated_wait_ms"] if refused else one["waited_ms"]
        what = one["reason"] if refused else "admitted, shortened" if one["shrunk"] else "admitted"
        last.add_row(one["at"], one["backend"], one["class"], one["tenant"], what, f"{wait:,.0f}")
    console.print(last)
