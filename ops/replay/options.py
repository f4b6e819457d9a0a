"""The options of a replay, checked, and its errors."""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ops.cli.operator import Key, Url
from ops.client import DEFAULT_URL

MAX_CONCURRENCY = 10_000


class ContractName(StrEnum):
    """Values of ``--contract``."""

    NATIVE = "native"
    OPENAI = "openai"


class ReplayError(Exception):
    """A replay cannot begin; the message is ready to print.

    ::

        ReplayError
        ├── TraceError      the trace cannot be read
        ├── OptionError     an option's value is not allowed
        └── TargetError     the gateway cannot be used: not reached, key refused, model unknown
    """


class TraceError(ReplayError):
    """The trace is missing, empty, or a row of it cannot be read; the message names file and row."""


class OptionError(ReplayError):
    """An option's value is not allowed; the message names the option, the value and what is allowed."""


class TargetError(ReplayError):
    """The gateway did not answer the first calls correctly."""


@dataclass(frozen=True, slots=True)
class ReplaySlo:
    """The limits for goodput, in milliseconds from sending; by default those of the routes' SLO."""

    ttft_ms: Annotated[float, Option("--slo-ttft-ms", help="Goodput's limit on TTFT.")] = 200.0
    total_ms: Annotated[float, Option("--slo-total-ms", help="Goodput's limit on the whole answer.")] = 1400.0


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `sluice replay`; building them raises OptionError for a value that is not allowed."""

    trace: Annotated[Path, Argument(metavar="TRACE", help="Azure CSV or Mooncake JSON lines.")]
    url: Url = DEFAULT_URL
    key: Key = None
    speed: Annotated[float, Option(help="Divide the trace's times by this.")] = 1.0
    limit: Annotated[int | None, Option(help="Number of rows to replay; default: all.")] = None
    skip: Annotated[int, Option(help="Number of rows to skip at the start.")] = 0
    scale_tokens: Annotated[
        float, Option(help="Multiply prompt and answer lengths by this (at least 1 token).")
    ] = 1.0
    concurrency: Annotated[int, Option(help="Most requests in flight.")] = 256
    contract: Annotated[ContractName, Option(help="Which API to use.")] = ContractName.NATIVE
    route: Annotated[str | None, Option(help="A route of the gateway; default: its default route.")] = None
    model: Annotated[
        str | None, Option(help="For --contract openai; default: the gateway's first model.")
    ] = None
    slo: ReplaySlo = ReplaySlo()
    timeout_s: Annotated[float, Option("--timeout", help="Timeout of one request, seconds.")] = 120.0
    seed: Annotated[int, Option(help="Seed of the prompts' words.")] = 0
    max_model_len: Annotated[
        int | None, Option(help="Cut lengths to this; default: the gateway's maximum.")
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
                raise OptionError(f"{name}: {value} is not allowed; a number above 0 is")
        if self.limit is not None and self.limit < 1:
            raise OptionError(f"--limit: {self.limit} is not allowed; 1 and more is")
        if self.skip < 0:
            raise OptionError(f"--skip: {self.skip} is not allowed; 0 and more is")
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise OptionError(f"--concurrency: {self.concurrency} is not allowed; 1 to {MAX_CONCURRENCY} is")
        if not self.url.startswith(("http://", "https://")):
            raise OptionError("--url: not an http(s) address; for example http://127.0.0.1:8000")
