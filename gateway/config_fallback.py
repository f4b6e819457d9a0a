"""Limits of the fallback chain's legs, and what backends cost."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config_section import Section

Usd = Annotated[float, Field(ge=0, le=1_000_000)]


class PriceConfig(Section):
    """What a backend costs, US dollars for a million tokens; cached ones cost as the others when unset."""

    input_usd_per_million: Usd
    output_usd_per_million: Usd
    cached_usd_per_million: Usd | None = None


class LegLimitConfig(Section):
    """Bounds of one backend as a leg of fallback chains; what is unset has none."""

    max_concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None
    max_spend_usd_per_minute: Annotated[float, Field(gt=0, le=1_000_000)] | None = None


class FallbackSection(Section):
    """The fallback chain, for all routes together."""

    limits: dict[str, LegLimitConfig] = Field(default={})
