"""How much worse a variant may be, for each group of prompts: a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from evaluation.adapter_regression.thresholds import METRICS, Threshold, Thresholds, ThresholdsError

DEFAULT = Path(__file__).with_name("thresholds.yaml")


class QuantizationGate(BaseModel):
    """The gate file.

    Args:
        confidence: of the intervals.
        groups: by the prompts' group, then by metric; a group that is not listed is shown, not judged.
        refusals: patterns that recognise an answer that declines.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    groups: Annotated[dict[str, dict[str, Threshold]], Field(min_length=1)]
    refusals: tuple[str, ...] = ()

    @field_validator("groups")
    @classmethod
    def _known(cls, groups: dict[str, dict[str, Threshold]]) -> dict[str, dict[str, Threshold]]:
        for group, metrics in groups.items():
            for name in metrics:
                if name not in METRICS:
                    raise ValueError(f"{group}: no metric {name!r}; allowed: {', '.join(METRICS)}")
        return groups

    def thresholds(self, group: str) -> Thresholds:
        """Return the thresholds of one group."""
        return Thresholds(
            confidence=self.confidence, metrics=self.groups.get(group, {}), refusals=self.refusals
        )


def load_gate(path: Path = DEFAULT) -> QuantizationGate:
    """Read a gate file. Raises ThresholdsError."""
    try:
        gate = QuantizationGate.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        gate.thresholds("")  # the patterns compile
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ThresholdsError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ThresholdsError(f"{path}: {where}: {first['msg']}") from None
    return gate
