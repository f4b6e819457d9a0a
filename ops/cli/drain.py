"""`sluice drain`: takes one gateway process out of service."""

import time
from typing import Annotated, Any

import typer

from ops.cli.operator import Operator, with_options

POLL_S = 0.5


@with_options()
def drain(
    gateway: Operator,
    wait: Annotated[
        float,
        typer.Option(
            min=0, help="Longest wait, in seconds, until no request is in flight and none is accepted."
        ),
    ] = 0.0,
) -> None:
    """Take one gateway process out of service; the process does not end.

    It reports not ready and finishes requests in flight; new ones get 503 `draining`, once
    server.lame_duck_seconds are over. Only a restart undoes it. Exit code 1 if not drained after --wait.

    Example: sluice drain --url http://10.0.0.5:8000 --wait 120
    """
    end = time.monotonic() + wait
    while True:
        answer = gateway.post("admin", "drain")
        drained = answer["closed"] and not answer["in_flight"]
        if drained or time.monotonic() >= end:
            break
        time.sleep(POLL_S)
    gateway.show(answer, _print)
    if wait and not drained:
        raise typer.Exit(1)


def _print(answer: Any) -> None:
    count = answer["in_flight"]
    still = "" if answer["closed"] else ", new ones are still accepted"
    print(f"draining; {count} request{'' if count == 1 else 's'} in flight{still}")
