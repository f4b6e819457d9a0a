"""The key ``hedge`` of a pool of workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config_section import Section


class HedgeSection(Section):
    """When a request that waits for its first token is sent to a second worker too; docs/workers.md."""

    enabled: bool = False
    quantile: Annotated[float, Field(ge=0.5, le=0.999)] = 0.99
    min_ms: Annotated[float, Field(ge=1, le=600_000)] = 50.0
    max_share: Annotated[float, Field(gt=0, le=0.5)] = 0.05
