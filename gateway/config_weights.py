"""The section of the configuration that says how a model's files are fetched."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config_section import Section


class WeightsSection(Section):
    """Where fetched models are kept, and how ``s3://`` is reached; credentials: the AWS SDK's chain."""

    cache_folder: Annotated[str, Field(min_length=1)] = "~/.cache/sluice"
    endpoint_url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    region: str | None = None
    connections: Annotated[int, Field(ge=1, le=64)] = 8
    connect_timeout_seconds: Annotated[float, Field(gt=0, le=60)] = 5.0
    read_timeout_seconds: Annotated[float, Field(gt=0, le=300)] = 20.0
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 7200.0
