"""The options of `sluice rollout check`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """What the operator tells about Prometheus, replays and the platform; each answers a check."""

    prometheus: Annotated[
        str | None, Option(help="The Prometheus whose rules are checked: http://HOST:9090.")
    ] = None
    replay: Annotated[
        Path | None, Option(help="Output file of `sluice replay TRACE --output FILE` with real traffic.")
    ] = None
    soak: Annotated[Path | None, Option(help="The same of a replay of half an hour or more.")] = None
    config: Annotated[
        Path | None, Option("--config", "-c", help="The gateway's configuration, which has its drain time.")
    ] = None
    grace: Annotated[
        float | None, Option(min=0, help="Seconds between SIGTERM and SIGKILL on its platform.")
    ] = None
