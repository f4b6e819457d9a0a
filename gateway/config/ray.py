"""The section ``ray`` for Ray Serve; ``sluice serve`` ignores it."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from gateway.config.section import AffinitySection, Attempts, Seconds

Count = Annotated[int, Field(ge=1, le=10_000)]


class RaySection(AffinitySection):
    """How many replicas there are, and when they scale; docs/ray.md explains each key.

    ``scale_up_seconds`` and ``scale_down_seconds`` are Serve's own defaults. ``drain_seconds`` is as long as
    ``server.request_timeout_seconds``, so that a stopping replica completes its answers.
    ``engine_target_kv`` is admission's lowest watermark; above it, low-priority requests wait.
    """

    application: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] = "sluice"
    gateways_min: Count = 1
    gateways_max: Count = 1
    gateway_cpus: Annotated[float, Field(ge=0, le=1024)] = 1.0
    gateway_target_requests: Annotated[float, Field(gt=0, le=100_000)] | None = None
    engines_min: Count = 1
    engines_max: Count = 1
    engine_cpus: Annotated[float, Field(ge=0, le=1024)] = 1.0
    engine_gpus: Annotated[float, Field(ge=0, le=1024)] | None = None
    engine_target_sequences: Annotated[float, Field(gt=0, le=100_000)] | None = None
    engine_target_kv: Annotated[float, Field(gt=0, le=1)] = 0.90
    scale_up_seconds: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    scale_down_seconds: Annotated[float, Field(ge=0, le=86_400)] = 600.0
    metrics_seconds: Seconds = 10.0
    signals_seconds: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    drain_seconds: Seconds = 300.0
    surge_percent: Annotated[int, Field(ge=0, le=100)] = 25
    first_token_timeout_seconds: Seconds = 30.0
    idle_timeout_seconds: Seconds = 30.0
    max_attempts: Attempts = 3

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for kind in ("gateways", "engines"):
            least, most = getattr(self, f"{kind}_min"), getattr(self, f"{kind}_max")
            if most < least:
                raise ValueError(
                    f"{kind}_max: {most} is less than {kind}_min ({least}); allowed: at least as many"
                )
        return self
