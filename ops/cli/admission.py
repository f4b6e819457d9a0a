"""`sluice admission`: queues by backend, what holds them up, and the last decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ops.cli.console import table_of
from ops.cli.operator import Operator, command_group, operator_command

if TYPE_CHECKING:
    from rich.console import Console

# Decisions that fit a screen; --json shows all that the gateway keeps.
SHOWN_DECISIONS = 15

admission = command_group("admission", "Queues of the backends, and the last decisions of admission.")


@operator_command(admission, "show")
def show(gateway: Operator) -> None:
    """Show queues, limits, forecasts and the last decisions.

    Example: sluice admission show --url http://127.0.0.1:8000 --json
    """
    gateway.show(gateway.get("admin", "admission"), _print)


def _print(console: Console, found: Any) -> None:
    if not found["backends"]:
        console.print("No backend has had a request yet.")
        return
    gates = table_of(
        "backend", "waiting", "held by", "in flight", "TPOT", "memory", "forecast", "overload level",
        "circuit", "slot time ms",
    )  # fmt: skip
    for name, gate in found["backends"].items():
        queue, flight, memory = gate["queue"], gate["in_flight"], gate["memory"]
        classes = " ".join(f"{word} {count}" for word, count in queue["classes"].items() if count)
        gates.add_row(
            name,
            f"{queue['requests']} ({classes})" if classes else "0",
            queue["held_by"] or "",
            f"{flight['sequences']} of {flight['limit']}" + _less_than_the_engine_takes(flight),
            "" if flight["pace_of_target"] is None else f"{flight['pace_of_target']:.0%} of target",
            f"{memory['used']:.0%}",
            f"{memory['forecast']:.0%}",
            str(gate["ladder"]["rung"]),
            gate["circuit"]["state"],
            f"{gate['rates']['held_ms']:,.0f}",
        )
    console.print(gates)
    waiting = table_of("backend", "class", "tenant", "waiting")
    for name, gate in found["backends"].items():
        for one in gate["queue"]["tenants"]:
            waiting.add_row(name, one["class"], one["tenant"], str(one["requests"]))
    if waiting.row_count:
        console.print(waiting)
    last = table_of(
        "at", "backend", "class", "tenant", "decision", "wait ms", "retry after ms", title="last decisions"
    )
    for one in found["decisions"][:SHOWN_DECISIONS]:
        refused = one["decision"] == "refused"
        wait = one["estimated_wait_ms"] if refused else one["waited_ms"]
        what = "admitted, shortened" if not refused and one["shrunk"] else "admitted"
        if refused:
            what = f"{one['reason']}, in queue" if one["queued"] else one["reason"]
        again = f"{one['retry_after_ms']:,.0f}" if refused else ""
        last.add_row(one["at"], one["backend"], one["class"], one["tenant"], what, f"{wait:,.0f}", again)
    console.print(last)


def _less_than_the_engine_takes(flight: Any) -> str:
    most = flight["engine_limit"]
    return f" (engine {most})" if most is not None and most > flight["limit"] else ""
