"""How much worse a variant may be, for each group of prompts: a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from evaluation.adapter_regression.thresholds import Metric, Threshold, Thresholds, ThresholdsError
from gateway.config.section import Pattern, Section
from gateway.config.yaml_file import read_yaml

DEFAULT = Path(__file__).with_name("thresholds.yaml")


class QuantizationGate(Section):
    """The gate file.

    Args:
        confidence: of the intervals.
        groups: by the prompts' group, then by metric; a group that is not listed is shown, not judged.
        refusals: patterns that recognise an answer that declines.
    """

    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    groups: Annotated[dict[str, dict[Metric, Threshold]], Field(min_length=1)]
    refusals: tuple[Pattern, ...] = ()

    def thresholds(self, group: str) -> Thresholds:
        """Return the thresholds of one group."""
        return Thresholds(
            confidence=self.confidence, metrics=self.groups.get(group, {}), refusals=self.refusals
        )


def load_gate(path: Path = DEFAULT) -> QuantizationGate:
    """Read a gate file. Raises ThresholdsError."""
    return read_yaml(path, QuantizationGate, ThresholdsError)
