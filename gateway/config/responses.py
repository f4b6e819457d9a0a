"""The section ``responses``."""

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
