"""The base of every section of the configuration."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


Seconds = Annotated[float, Field(gt=0, le=86_400)]
Attempts = Annotated[int, Field(ge=1, le=16)]
Pattern = Annotated[str, AfterValidator(_compiles)]
# Before a choice of which one is "off": YAML reads a bare ``off`` as false.
OffIsAWord = BeforeValidator(lambda value: "off" if value is False else value)


class Section(BaseModel):
    """Unknown keys are refused; nothing changes after the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AffinitySection(Section):
    """How a prompt's prefix leads it to the same engine again."""

    affinity: bool = True
    affinity_block_tokens: Annotated[int, Field(ge=1, le=4096)] = 64
    affinity_load_factor: Annotated[float, Field(ge=1, le=100)] = 1.25
    affinity_index_blocks: Annotated[int, Field(ge=1, le=10_000_000)] = 32_768
