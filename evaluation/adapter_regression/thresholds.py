"""How much worse a candidate may be: a YAML file, by default ``thresholds.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import AfterValidator, Field

from gateway.config.section import Pattern, Section
from gateway.config.yaml_file import read_yaml

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


def _known(metric: str) -> str:
    if metric not in METRICS:
        raise ValueError(f"no metric {metric!r}; allowed: {', '.join(METRICS)}")
    return metric


Metric = Annotated[str, AfterValidator(_known)]


class ThresholdsError(Exception):
    """The thresholds file cannot be used; the message names the key and the allowed values."""


class Threshold(Section):
    """What is allowed for one metric.

    Args:
        worse_by: the most that the candidate may be worse, in the metric's own unit; for ``ttft`` and
            ``tpot`` the greatest ratio. Unset: shown, not judged. worse_by_than_base: the same when there is
            no active version and the base model is the reference. at_least: lowest allowed mean of the
            candidate, whatever the other's mean is.
    """

    worse_by: Annotated[float, Field(ge=0)] | None = None
    worse_by_than_base: Annotated[float, Field(ge=0)] | None = None
    at_least: Annotated[float, Field(ge=0, le=1)] | None = None

    def allowed(self, *, against_base: bool) -> float | None:
        """Return the limit that applies."""
        if against_base and self.worse_by_than_base is not None:
            return self.worse_by_than_base
        return self.worse_by


class Thresholds(Section):
    """The thresholds file.

    Args:
        confidence: of the intervals.
        metrics: by name.
        refusals: patterns that recognise an answer that declines.
    """

    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    metrics: dict[Metric, Threshold]
    refusals: tuple[Pattern, ...] = ()

    @property
    def refusal_patterns(self) -> tuple[re.Pattern[str], ...]:
        """Return the compiled patterns, which ignore case."""
        return tuple(re.compile(pattern, re.IGNORECASE) for pattern in self.refusals)


def load_thresholds(path: Path = DEFAULT) -> Thresholds:
    """Read a thresholds file. Raises ThresholdsError."""
    return read_yaml(path, Thresholds, ThresholdsError)
