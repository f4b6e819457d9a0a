"""The sections ``images`` and ``models.<id>.images``; docs/images.md explains each key."""

from typing import Annotated

from pydantic import Field, IPvAnyNetwork

from budgeting.images import ImageCost, ImageRounding
from gateway.config.section import Section

HostName = Annotated[str, Field(pattern=r"^\.?[a-z0-9_]([a-z0-9_.-]{0,252})$|^[0-9a-f:]{2,39}$")]
Tokens = Annotated[int, Field(ge=0, le=100_000)]
Pixels = Annotated[int, Field(ge=1, le=1_000_000_000)]


class ImagesSection(Section):
    """Limits of the images of one request, and the hosts and networks from which they are fetched."""

    max_per_request: Annotated[int, Field(ge=1, le=1_000)] = 16
    max_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 10_485_760
    max_pixels: Pixels = 40_000_000
    fetch: bool = True
    fetch_hosts: Annotated[tuple[HostName, ...], Field(max_length=1_000)] = ()
    fetch_networks: Annotated[tuple[IPvAnyNetwork, ...], Field(max_length=256)] = ()
    fetch_timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 10.0


class ModelImages(Section):
    """How many tokens a vision model uses for an image."""

    unit: Annotated[int, Field(ge=1, le=10_000)] = 28
    unit_tokens: Tokens = 1
    row_tokens: Tokens = 0
    base_tokens: Tokens = 2
    min_pixels: Pixels = 3_136
    max_pixels: Pixels = 12_845_056
    min_edge: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max_edge: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000_000
    max_short_edge: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000_000
    rounding: ImageRounding = ImageRounding.NEAREST

    @property
    def cost(self) -> ImageCost:
        return ImageCost(**self.model_dump())
