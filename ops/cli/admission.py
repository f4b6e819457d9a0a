"""`sluice admission`: queues by backend, what holds them up, and the last decisions."""

from typing import Any

from ops.cli.console import print_lines, print_rows
from ops.cli.operator import Operator, command_group, operator_command

SHOWN_DECISIONS = 15  # decisions that fit a screen; --json shows all that the gateway keeps

admission = command_group("admission", "Queues of the backends, and the last decisions of admission.")


@operator_command(admission, "show")
def show(gateway: Operator) -> None:
    """Show queues, limits, forecasts and the last decisions.

    Example: sluice admission show --url http://127.0.0.1:8000 --json
    """
    gateway.show(gateway.get("admin", "admission"), _print)


def _print(found: Any) -> None:
    if not found["backends"]:
        print_lines("No backend has had a request yet.")
        return
    headings = (
        "backend", "waiting", "held by", "in flight", "TPOT", "memory", "forecast", "overload level",
        "circuit", "slot time ms",
    )  # fmt: skip
    print_rows(headings, (_backend(name, gate) for name, gate in found["backends"].items()))
    waiting = [
        (name, one["class"], one["tenant"], one["requests"])
        for name, gate in found["backends"].items()
        for one in gate["queue"]["tenants"]
    ]
    if waiting:
        print_rows(("backend", "class", "tenant", "waiting"), waiting)
    last = ("at", "backend", "class", "tenant", "decision", "wait ms", "retry after ms")
    decisions = map(_decision, found["decisions"][:SHOWN_DECISIONS])
    print_rows(last, decisions, title="last decisions")


def _backend(name: str, gate: Any) -> tuple[object, ...]:
    queue, flight, memory = gate["queue"], gate["in_flight"], gate["memory"]
    classes = " ".join(f"{word} {count}" for word, count in queue["classes"].items() if count)
    most = flight["engine_limit"]
    engine = f" (engine {most})" if most is not None and most > flight["limit"] else ""
    return (
        name,
        f"{queue['requests']} ({classes})" if classes else "0",
        queue["held_by"] or "",
        f"{flight['sequences']} of {flight['limit']}{engine}",
        "" if flight["pace_of_target"] is None else f"{flight['pace_of_target']:.0%} of target",
        f"{memory['used']:.0%}",
        f"{memory['forecast']:.0%}",
        gate["ladder"]["rung"],
        gate["circuit"]["state"],
        f"{gate['rates']['held_ms']:,.0f}",
    )


def _decision(one: Any) -> tuple[object, ...]:
    place = (one["at"], one["backend"], one["class"], one["tenant"])
    if one["decision"] == "refused":
        reason = f"{one['reason']}, in queue" if one["queued"] else one["reason"]
        return (*place, reason, f"{one['estimated_wait_ms']:,.0f}", f"{one['retry_after_ms']:,.0f}")
    admitted = "admitted, shortened" if one["shrunk"] else "admitted"
    return (*place, admitted, f"{one['waited_ms']:,.0f}", "")
