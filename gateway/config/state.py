"""The section ``state``: the state store."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from gateway.config.section import Section

# The folder of all files that a gateway with default configuration writes; deleting it resets the gateway.
STATE_FOLDER = Path("state")
DEFAULT_FILE = STATE_FOLDER / "sluice.db"


class AuditSection(Section):
    """The audit log. With ``required``, a change whose audit record cannot be written is refused.

    ``key_file`` holds the keys that sign records; without it they come from the environment.
    """

    required: bool = False
    key_file: Annotated[str, Field(min_length=1)] | None = None


class StateConfig(Section):
    """The store of the event streams that all gateway processes read, idempotent replies, and key limits."""

    url: str = f"sqlite:///{DEFAULT_FILE}"
    limits_url: str | None = None
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "default"
    cache_dir: Annotated[str, Field(min_length=1)] | None = None
    poll_seconds: Annotated[float, Field(ge=0.05, le=60)] = 1.0
