"""The section ``state``: the state store."""

from typing import Annotated

from pydantic import Field

from gateway.config.section import Section


class StateConfig(Section):
    """Streams that every gateway process follows, idempotent replies, and keys' limits."""

    url: str = "sqlite:///sluice.db"
    limits_url: str | None = None
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "default"
    cache_dir: Annotated[str, Field(min_length=1)] | None = None
    poll_seconds: Annotated[float, Field(ge=0.05, le=60)] = 1.0
