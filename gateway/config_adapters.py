"""The section of the configuration that says where adapters come from and how they are kept."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from adapters.heat import HALF_LIFE_S
from gateway.config_section import Section


class AdaptersConfig(Section):
    """The LoRA registry. The registry itself is in the state store; ``file`` is imported at each start."""

    file: str | None = None
    folder: Annotated[str, Field(min_length=1)] | None = None
    base_names: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    half_life_seconds: Annotated[float, Field(ge=1, le=604_800)] = HALF_LIFE_S
    preload_timeout_seconds: Annotated[float, Field(ge=0, le=3600)] = 60.0
    fetch_timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 3600.0
