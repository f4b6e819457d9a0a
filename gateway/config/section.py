"""The base of every section of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Unknown keys are refused; nothing changes after the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)
