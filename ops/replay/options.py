"""The options of a replay, checked, and its errors."""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

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
    """The limits for goodput, in milliseconds from sending."""

    ttft_ms: float
    total_ms: float


# The routes' default SLO: TTFT P50 under 200 ms, whole answer P99 under 1,400 ms.
DEFAULT_SLO = ReplaySlo(ttft_ms=200.0, total_ms=1400.0)


@dataclass(frozen=True, slots=True)
class Options:
    """A replay's options; building them raises OptionError for a value that is not allowed.

    Args:
        speed: divisor of the trace's times.
        limit: number of rows to replay; ``None`` for all.
        skip: number of rows to skip first.
        scale_tokens: factor for the lengths of prompt and answer.
        concurrency: most requests in flight.
        model: the model for OpenAI's contract; ``None`` for the gateway's first.
        max_model_len: limit of prompt and answer together; ``None`` uses the gateway's.
        no_fallback: request errors instead of fallback answers.
    """

    trace: Path
    url: str = "http://127.0.0.1:8000"
    key: str | None = None
    speed: float = 1.0
    limit: int | None = None
    skip: int = 0
    scale_tokens: float = 1.0
    concurrency: int = 256
    contract: ContractName = ContractName.NATIVE
    route: str | None = None
    model: str | None = None
    slo: ReplaySlo = DEFAULT_SLO
    timeout_s: float = 120.0
    seed: int = 0
    max_model_len: int | None = None
    no_fallback: bool = False

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
