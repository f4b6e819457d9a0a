"""The base of every section of the configuration."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gateway.config.yaml_file import arms


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


def _no_address(folder: str) -> str:
    """Refuse an address. Messages do not contain it, because it may contain a password."""
    if "://" in folder:
        raise ValueError("is an address; allowed: a folder of this machine")
    return folder


Folder = Annotated[str, AfterValidator(_no_address)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Attempts = Annotated[int, Field(ge=1, le=16)]
Pattern = Annotated[str, AfterValidator(_compiles)]
# For an enum with a member "off": YAML reads an unquoted ``off`` as false.
OffIsAWord = BeforeValidator(lambda value: "off" if value is False else value)


class Section(BaseModel):
    """The base class: a section refuses unknown keys and is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, data: Any) -> Any:
        """Refuse true and false for a number: pydantic would read them as 1 and 0."""
        for name, value in data.items() if isinstance(data, dict) else ():
            if isinstance(value, bool) and name in cls.model_fields:
                kinds = arms(cls.model_fields[name].annotation)
                if bool not in kinds and {int, float} & set(kinds):
                    raise ValueError(
                        f"{name}: is {value}, which YAML makes of yes, no, on and off too; allowed: a number"
                    )
        return data


class AffinitySection(Section):
    """Prefix affinity: prompts with the same prefix are routed to the same engine."""

    affinity: bool = True
    affinity_block_tokens: Annotated[int, Field(ge=1, le=4096)] = 64
    affinity_load_factor: Annotated[float, Field(ge=1, le=100)] = 1.25
    affinity_index_blocks: Annotated[int, Field(ge=1, le=10_000_000)] = 32_768
