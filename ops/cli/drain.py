"""`sluice drain`: takes one gateway process out of service."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from ops.client import DEFAULT_URL, AdminClient, AdminError, AsJson, Key, Url

ASK_EVERY_S = 0.5


def drain(
    url: Url = DEFAULT_URL,
    key: Key = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Wait so many seconds at most until nobody is inside or comes.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Take one gateway process out of service: not ready, finish, stop admitting; it does not end.

    Requests under way go on to their end; new ones get 503 `draining`, once server.lame_duck_seconds are
    over. There is no way back but a restart. Exit code 1 when somebody is still inside after --wait.

    Example: sluice drain --url http://10.0.0.5:8000 --wait 120
    """
    client = AdminClient(url, key)
    try:
        told = client.post("admin", "drain", body=b"")
        end = time.monotonic() + wait
        while not _over(told) and time.monotonic() < end:
            time.sleep(ASK_EVERY_S)
            told = client.post("admin", "drain", body=b"")
    except AdminError as error:
        print(f"sluice: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    _print(told, as_json=as_json)
    if wait and not _over(told):
        raise typer.Exit(1)


def _over(told: Any) -> bool:
    """Whether nobody is inside, and nobody comes any more."""
    return bool(told["closed"] and not told["in_flight"])


def _print(told: Any, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(told))
    else:
        count = told["in_flight"]
        still = "" if told["closed"] else ", new ones are still taken"
        print(f"draining; {count} request{'' if count == 1 else 's'} under way{still}")
