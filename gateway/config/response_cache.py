"""The section ``response_cache``."""

from typing import Annotated

from pydantic import Field

from gateway.config.section import Section


class CacheConfig(Section):
    """The response cache that the fallback chain may answer from; docs/response-cache.md explains each key.
    ``timeout_ms`` is short, because the request has already waited for a failed backend.
    """

    capacity: Annotated[int, Field(ge=0, le=1_000_000)] = 2_000
    max_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    ttl_seconds: Annotated[float, Field(gt=0, le=31_536_000)] = 900.0
    url: str | None = None
    timeout_ms: Annotated[float, Field(gt=0, le=10_000)] = 250.0
    outbox: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
