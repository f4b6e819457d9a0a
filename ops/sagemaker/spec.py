"""The specification of an endpoint: one YAML file."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from gateway.config.errors import ConfigError
from gateway.config.section import Section
from gateway.config.yaml_file import read_yaml

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,39}$")]
Arn = Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:iam::\d{12}:role/.+$")]
# A tag may mean a different image for a later instance of the same endpoint; a digest cannot.
Image = Annotated[str, Field(pattern=r"^[^\s@]+(@sha256:[0-9a-f]{64}|:[\w.-]+)$")]


class ScalingSpec(Section):
    """Bounds of the number of instances, and the scaling targets per instance.

    ``active_sequences``: an A10G with Llama-3-8B in AWQ runs 85 to 90 at once. ``waiting_requests``: the
    queue length at which llm-d's endpoint picker considers a worker saturated. Cooldowns: scaling in waits
    longer than a model takes to load.
    """

    min_instances: Annotated[int, Field(ge=1, le=1000)] = 1
    max_instances: Annotated[int, Field(ge=1, le=1000)] = 4
    active_sequences: Annotated[float, Field(gt=0)] = 85.0
    waiting_requests: Annotated[float, Field(gt=0)] = 5.0
    scale_out_cooldown_seconds: Annotated[int, Field(ge=0, le=7200)] = 60
    scale_in_cooldown_seconds: Annotated[int, Field(ge=0, le=7200)] = 600

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_instances > self.max_instances:
            raise ValueError(
                f"scaling.min_instances ({self.min_instances}) is above max_instances ({self.max_instances})"
            )
        return self


class UpdateSpec(Section):
    """How a new version replaces the old one; in both kinds new instances serve before old ones end.

    ``blue_green`` needs the whole fleet twice for a while; ``rolling`` replaces ``batch_percent`` at a time.
    An alarm of ``rollback_alarms`` during the update rolls back to the old version.
    """

    kind: Literal["blue_green", "rolling"] = "blue_green"
    canary_percent: Annotated[int, Field(ge=1, le=50)] | None = None
    batch_percent: Annotated[int, Field(ge=5, le=50)] = 25
    wait_seconds: Annotated[int, Field(ge=0, le=3600)] = 300
    at_most_seconds: Annotated[int, Field(ge=600, le=28_800)] = 3600
    rollback_alarms: tuple[str, ...] = ()


class EndpointSpec(Section):
    """An endpoint with one variant."""

    name: Name
    region: str
    image: Image
    role_arn: Arn
    instance_type: Annotated[str, Field(pattern=r"^ml\.")]
    model_data: Annotated[str, Field(pattern=r"^s3://[^/]+/.+/$")] | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    startup_timeout_seconds: Annotated[int, Field(ge=60, le=3600)] = 900
    download_timeout_seconds: Annotated[int, Field(ge=60, le=3600)] = 1800
    kms_key_id: str | None = None
    scaling: ScalingSpec = ScalingSpec()
    update: UpdateSpec = UpdateSpec()
    tags: dict[str, str] = Field(default_factory=dict)

    @field_validator("image")
    @classmethod
    def _image_stays_the_same(cls, image: str) -> str:
        if image.endswith(":latest"):
            raise ValueError("latest is another image tomorrow; allowed: a version, or a digest")
        return image

    @model_validator(mode="after")
    def _network_is_whole(self) -> Self:
        if bool(self.subnets) != bool(self.security_groups):
            raise ValueError("subnets and security_groups are set together or not at all")
        return self


def load_spec(path: Path) -> EndpointSpec:
    """Read and check the file. Raises ConfigError, with one line per fault."""
    return read_yaml(path, EndpointSpec, ConfigError)
