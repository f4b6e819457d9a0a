"""How much worse a candidate may be: a YAML file, by default ``thresholds.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

DEFAULT = Path(__file__).with_name("thresholds.yaml")

# The metrics; True: more is better.
METRICS: Mapping[str, bool] = MappingProxyType(
    {
        "loss": False,
        "similarity": True,
        "exact": True,
        "facts": True,
        "format": True,
        "language": True,
        "refusal": True,
        "willing": True,
        "sound": True,
        "ttft": False,
        "tpot": False,
    }
)
# Compared as ratios: candidate over active.
RATIOS = frozenset({"ttft", "tpot"})


class ThresholdsError(Exception):
    """The thresholds file cannot be used; the message names the key and the allowed values."""


class Threshold(BaseModel):
    """What is allowed for one metric.

    Args:
        worse_by: the most that the candidate may be worse, in the metric's own unit; for ``ttft`` and
            ``tpot`` the greatest ratio. Unset: shown, not judged. worse_by_than_base: the same when there is
            no active version and the base model is the reference. at_least: lowest allowed mean of the
            candidate, whatever the other's mean is.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    worse_by: Annotated[float, Field(ge=0)] | None = None
    worse_by_than_base: Annotated[float, Field(ge=0)] | None = None
    at_least: Annotated[float, Field(ge=0, le=1)] | None = None

    def allowed(self, *, against_base: bool) -> float | None:
        """Return the limit that applies."""
        if against_base and self.worse_by_than_base is not None:
            return self.worse_by_than_base
        return self.worse_by


class Thresholds(BaseModel):
    """The thresholds file.

    Args:
        confidence: of the intervals.
        metrics: by name.
        refusals: patterns that recognise an answer that declines.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    metrics: dict[str, Threshold]
    refusals: tuple[str, ...] = ()

    @field_validator("metrics")
    @classmethod
    def _known(cls, metrics: dict[str, Threshold]) -> dict[str, Threshold]:
        for name in metrics:
            if name not in METRICS:
                raise ValueError(f"no metric {name!r}; allowed: {', '.join(METRICS)}")
        return metrics

    @field_validator("refusals")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns

    @property
    def refusal_patterns(self) -> tuple[re.Pattern[str], ...]:
        """Return the compiled patterns, which ignore case."""
        return tuple(re.compile(pattern, re.IGNORECASE) for pattern in self.refusals)


def load_thresholds(path: Path = DEFAULT) -> Thresholds:
    """Read a thresholds file. Raises ThresholdsError."""
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Thresholds.model_validate(content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ThresholdsError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ThresholdsError(f"{path}: {where}: {first['msg']}") from None
