"""`sluice drain`: takes one gateway process out of service."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from ops.cli.operator import Operator, with_operator

ASK_EVERY_S = 0.5


@with_operator
def drain(
    gateway: Operator,
    wait: Annotated[
        float,
        typer.Option(
            min=0, help="Wait at most so many seconds until no request is in flight and none is accepted."
        ),
    ] = 0.0,
) -> None:
    """Take one gateway process out of service: not ready, finish, stop admitting; it does not end.

    Requests under way go on to their end; new ones get 503 `draining`, once server.lame_duck_seconds are
    over. There is no way back but a restart. Exit code 1 when a request is still in flight after --wait.

    Example: sluice drain --url http://10.0.0.5:8000 --wait 120
    """
    answer = gateway.post("admin", "drain")
    end = time.monotonic() + wait
    while not _over(answer) and time.monotonic() < end:
        time.sleep(ASK_EVERY_S)
        answer = gateway.post("admin", "drain")
    _print(answer, as_json=gateway.as_json)
    if wait and not _over(answer):
        raise typer.Exit(1)


def _over(answer: Any) -> bool:
    """Whether no request is in flight and none is accepted any more."""
    return bool(answer["closed"] and not answer["in_flight"])


def _print(answer: Any, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
    else:
        count = answer["in_flight"]
        still = "" if answer["closed"] else ", new ones are still taken"
        print(f"draining; {count} request{'' if count == 1 else 's'} under way{still}")
