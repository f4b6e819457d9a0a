"""The section ``tracing``: which spans are exported, and where to."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.config.section import Pattern, Section

MAX_PATTERNS = 32  # the most patterns; each costs a pass over the recorded content


class TracingConfig(Section):
    """OpenTelemetry export (docs/observability.md); without an endpoint there are trace ids but no spans."""

    otlp_endpoint: str | None = None
    protocol: Literal["http/protobuf", "grpc"] = "http/protobuf"
    headers: Annotated[dict[str, str], Field(max_length=16, repr=False)] = Field(default={})
    ca_file: str | None = None
    timeout_seconds: Annotated[float, Field(gt=0, le=60)] = 10.0
    service_name: Annotated[str, Field(min_length=1, max_length=128)] = "sluice"
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    follow_callers: bool = False
    redact: Annotated[list[Pattern], Field(max_length=MAX_PATTERNS)] = Field(default=[])
