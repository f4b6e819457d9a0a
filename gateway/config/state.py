"""The section ``state``: the state store."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from gateway.config.section import Section

# Everything that a gateway writes without further configuration is in this folder: delete it to start afresh.
STATE_FOLDER = Path("state")
DEFAULT_FILE = STATE_FOLDER / "sluice.db"


def earlier_file(url: str) -> str:
    """The url; instead of the default file one that an earlier version left in the working folder."""
    default, earlier = f":///{DEFAULT_FILE}", Path("sluice.db")
    return url.replace(default, f":///{earlier}") if url.endswith(default) and earlier.is_file() else url


class AuditSection(Section):
    """``required``: an operator's change whose audit record cannot be written is refused.

    ``key_file`` has the key that signs records, where the environment does not have it.
    """

    required: bool = False
    key_file: Annotated[str, Field(min_length=1)] | None = None


class StateConfig(Section):
    """Streams that every gateway process follows, idempotent replies, and keys' limits."""

    url: Annotated[str, Field(validate_default=True)] = f"sqlite:///{DEFAULT_FILE}"
    limits_url: str | None = None
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "default"
    cache_dir: Annotated[str, Field(min_length=1)] | None = None
    poll_seconds: Annotated[float, Field(ge=0.05, le=60)] = 1.0

    @field_validator("url")
    @classmethod
    def _earlier_file_is_used(cls, url: str) -> str:
        return earlier_file(url)
