"""The sections ``responses`` and ``response_cache``: stored answers."""

from typing import Annotated

from pydantic import Field

from gateway.config.section import Section


class ResponsesSection(Section):
    """Stored responses of ``/v1/responses``; docs/responses.md explains each key.

    They are in the ledger's database. ``keep_seconds`` is OpenAI's retention time, 30 days.
    """

    store: bool = True
    keep_seconds: Annotated[float, Field(ge=60, le=315_360_000)] = 2_592_000.0
    max_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 8 << 20
    max_tenant_bytes: Annotated[int, Field(ge=1024, le=1 << 44)] = 256 << 20
    seal_key_file: Annotated[str, Field(min_length=1)] | None = None
    max_background: Annotated[int, Field(ge=0, le=100_000)] = 256


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
