"""A scenario: the processes, the load, the faults and their times, and the allowed verdicts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from gateway.config.chaos import FaultRule
from gateway.config.section import Section
from gateway.config.yaml_file import read_yaml
from ops.chaos.errors import ChaosError

ROLE = r"^(gateway|engine|bedrock|worker:[0-9]{1,2})$"
Role = Annotated[str, Field(pattern=ROLE)]
Settings = dict[str, Any]


class Verdict(StrEnum):
    """The outcome of a request for its caller. ``lost`` and ``wrong`` must never occur."""

    WHOLE = "whole"  # the reference answer, without an interruption or fallback
    RESUMED = "resumed"  # a whole answer that a fault interrupted after its first token
    FALLBACK = "fallback"  # a whole answer from a fallback target
    DEGRADED = "degraded"  # the route's degraded text
    PARTIAL = "partial"  # an incomplete answer that is reported as such
    ERROR = "error"  # a reported error before the first token
    LOST = "lost"  # no end: cut off, refused, or silent for too long
    WRONG = "wrong"  # an answer with a wrong text, or with wrong ledger rows


NEVER = frozenset({Verdict.LOST, Verdict.WRONG})


class ScenarioStart(Section):
    """The processes that ``--start`` starts. Each worker is a gateway with its own embedded engine."""

    engine: Literal["embedded", "vllm", "none"] = "embedded"
    workers: Annotated[int, Field(ge=0, le=8)] = 0
    bedrock: bool = False
    settings: Settings = Field(default_factory=dict)
    route: Settings = Field(default_factory=dict)
    ready_within_s: Annotated[float, Field(gt=0, le=1800)] = 180.0


class ScenarioLoad(Section):
    """The load: concurrent clients, ``streams`` and ``whole``; each sends up to ``rounds`` requests."""

    streams: Annotated[int, Field(ge=0, le=1024)] = 8
    whole: Annotated[int, Field(ge=0, le=1024)] = 2
    rounds: Annotated[int, Field(ge=1, le=100_000)] = 1
    for_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    pause_s: Annotated[float, Field(ge=0, le=60)] = 0.0
    max_tokens: Annotated[int, Field(ge=1, le=100_000)] = 96
    deadline_ms: Annotated[int, Field(ge=1)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 90.0

    @model_validator(mode="after")
    def _has_requests(self) -> Self:
        if not self.streams + self.whole:
            raise ValueError("streams and whole are both 0; at least one request is needed")
        return self


class BedrockFault(Section):
    """The behaviour of the Bedrock stand-in from this action on; with all defaults it answers normally."""

    status: Annotated[int, Field(ge=200, le=599)] = 200
    error: str = ""
    hang_before: bool = False
    fault: Literal["", "hang", "cut", "close", "exception", "garbage", "crc", "json", "no_usage"] = ""
    after: Annotated[int, Field(ge=0)] = 2
    delay_s: Annotated[float, Field(ge=0, le=60)] = 0.0


class FaultAction(Section):
    """One action on a process, or a change of the injected faults; exactly one key is set."""

    kill: Role | None = None
    stop: Role | None = None
    cont: Role | None = None
    restart: Role | None = None
    inject: Annotated[tuple[FaultRule, ...], Field(max_length=64)] | None = None
    bedrock: BedrockFault | None = None

    @model_validator(mode="after")
    def _one_action(self) -> Self:
        if sum(getattr(self, name) is not None for name in FaultAction.model_fields) != 1:
            raise ValueError(f"one of {', '.join(FaultAction.model_fields)} is needed, and only one")
        return self

    @property
    def label(self) -> str:
        """The action's name in the report."""
        for name in ("kill", "stop", "cont", "restart"):
            if (role := getattr(self, name)) is not None:
                return f"{name} {role}"
        if self.inject is not None:
            return "inject " + (",".join(f"{rule.kind}@{rule.backend}" for rule in self.inject) or "nothing")
        fault = self.bedrock
        assert fault is not None
        reported = fault.error or fault.fault or ("hang" if fault.hang_before else "")
        return f"bedrock {reported or (fault.status if fault.status > 200 else 'well')}"

    @property
    def breaks(self) -> str | None:
        """The role whose process it breaks."""
        return self.kill or self.stop


class Fault(Section):
    """An action and its time: seconds after the load's start, or the number of pieces of the average stream.

    Actions at 0 are carried out before the first request is sent.
    """

    at_s: Annotated[float, Field(ge=0)] | None = None
    after_tokens: Annotated[int, Field(ge=1)] | None = None
    do: FaultAction

    @model_validator(mode="after")
    def _one_time(self) -> Self:
        if (self.at_s is None) == (self.after_tokens is None):
            raise ValueError("at_s or after_tokens is needed, and only one")
        return self


class RandomFault(Section):
    """An action that may be drawn, and the action ``then`` that repairs it ``for_s`` seconds later."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    do: FaultAction
    for_s: Annotated[float, Field(gt=0)] = 1.0
    then: FaultAction | None = None


class RandomFaults(Section):
    """Random faults during the load; each may be followed by an action that repairs it."""

    seed: int = 0
    every_s: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (5.0, 20.0)
    choices: Annotated[tuple[RandomFault, ...], Field(min_length=1, max_length=64)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.every_s[0] > self.every_s[1]:
            raise ValueError("every_s: the first is larger than the second")
        return self


class Scenario(Section):
    """A whole scenario.

    ``allow`` are the verdicts that a request may have; the run fails on any other. By default all are allowed
    but ``lost`` and ``wrong``. ``settle_s`` is how long the gateway may take to be ready again at the end.
    """

    about: Annotated[str, Field(min_length=1)]
    start: ScenarioStart = ScenarioStart()
    load: ScenarioLoad = ScenarioLoad()
    faults: Annotated[tuple[Fault, ...], Field(max_length=1000)] = ()
    random: RandomFaults | None = None
    allow: Annotated[tuple[Verdict, ...], Field(min_length=1)] = tuple(sorted(set(Verdict) - NEVER))
    settle_s: Annotated[float, Field(ge=0, le=600)] = 30.0


BUNDLED = Path(__file__).parent / "scenarios"


def load_scenario(path: Path) -> Scenario:
    """Read a scenario from a file, or the bundled scenario with that name. Raises ChaosError."""
    if not path.exists() and len(path.parts) == 1:
        names = sorted(one.stem for one in BUNDLED.glob("*.yaml"))
        if path.name not in names:
            raise ChaosError(f"{path}: cannot be read: no such file; bundled: {', '.join(names)}")
        path = BUNDLED / f"{path}.yaml"
    return read_yaml(path, Scenario, ChaosError)
