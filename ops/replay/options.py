"""The options of a replay, checked, and its errors."""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ops.cli.operator import Key, Url
from ops.client import DEFAULT_URL


class ContractName(StrEnum):
    """Values of ``--contract``."""

    NATIVE = "native"
    OPENAI = "openai"


class ReplayError(Exception):
    """A replay cannot begin: an option, the trace or the gateway does not allow it; ready to print."""


@dataclass(frozen=True, slots=True)
class ReplaySlo:
    """The limits for goodput, in milliseconds from sending; by default those of the routes' SLO."""

    ttft_ms: Annotated[float, Option("--slo-ttft-ms", help="Goodput's limit on TTFT.")] = 200.0
    total_ms: Annotated[float, Option("--slo-total-ms", help="Goodput's limit on the whole answer.")] = 1400.0


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `sluice replay`; building them raises ReplayError for a value that is not allowed."""

    trace: Annotated[Path, Argument(metavar="TRACE", help="Azure CSV or Mooncake JSON lines.")]
    url: Url = DEFAULT_URL
    key: Key = None
    speed: Annotated[float, Option(help="Divide the trace's times by this.")] = 1.0
    limit: Annotated[int | None, Option(min=1, help="Number of rows to replay; default: all.")] = None
    skip: Annotated[int, Option(min=0, help="Number of rows to skip at the start.")] = 0
    scale_tokens: Annotated[
        float, Option(help="Multiply prompt and answer lengths by this (at least 1 token).")
    ] = 1.0
    concurrency: Annotated[int, Option(min=1, max=10_000, help="Most requests in flight.")] = 256
    contract: Annotated[ContractName, Option(help="Which API to use.")] = ContractName.NATIVE
    route: Annotated[str | None, Option(help="A route of the gateway; default: its default route.")] = None
    model: Annotated[
        str | None, Option(help="For --contract openai; default: the gateway's first model.")
    ] = None
    slo: ReplaySlo = ReplaySlo()
    timeout_s: Annotated[float, Option("--timeout", help="Timeout of one request, seconds.")] = 120.0
    seed: Annotated[int, Option(help="Seed of the prompts' words.")] = 0
    max_model_len: Annotated[
        int | None, Option(min=1, help="Cut lengths to this; default: the gateway's maximum.")
    ] = None
    no_fallback: Annotated[
        bool, Option("--no-fallback", help="Request errors instead of fallback answers.")
    ] = False

    def __post_init__(self) -> None:
        for name, value in (
            ("--speed", self.speed),
            ("--scale-tokens", self.scale_tokens),
            ("--timeout", self.timeout_s),
            ("--slo-ttft-ms", self.slo.ttft_ms),
            ("--slo-total-ms", self.slo.total_ms),
        ):
            if not (math.isfinite(value) and value > 0):
                raise ReplayError(f"{name}: {value} is not allowed; a number above 0 is")
        if self.model is not None and self.contract is not ContractName.OPENAI:
            raise ReplayError("--model: the native contract has none; add --contract openai")
        if not self.url.startswith(("http://", "https://")):
            raise ReplayError("--url: not an http(s) address; for example http://127.0.0.1:8000")
