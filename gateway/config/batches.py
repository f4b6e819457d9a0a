"""The section ``batches``."""

from typing import Annotated

from pydantic import AfterValidator, Field

from gateway.config.section import Section
from gateway.config.state import STATE_FOLDER


def _folder(folder: str) -> str:
    """Refuse addresses of other storage than S3. Messages do not contain it: it may have a password."""
    if "://" in folder and not folder.startswith("s3://"):
        scheme = folder.partition("://")[0]
        raise ValueError(f"{scheme}:// is not known; allowed: a folder, or s3://bucket/prefix")
    return folder


class BatchesSection(Section):
    """Files and batches; docs/batches.md explains each key.

    ``max_lines`` and ``max_file_bytes`` are OpenAI's limits.
    """

    enabled: bool = True
    folder: Annotated[str, Field(min_length=1), AfterValidator(_folder)] = str(STATE_FOLDER / "files")
    max_file_bytes: Annotated[int, Field(ge=1024, le=1 << 40)] = 200 << 20
    max_tenant_bytes: Annotated[int, Field(ge=1024, le=1 << 44)] = 2 << 30
    max_lines: Annotated[int, Field(ge=1, le=10_000_000)] = 50_000
    keep_seconds: Annotated[float, Field(ge=60, le=315_360_000)] = 2_592_000.0
    max_running: Annotated[int, Field(ge=1, le=100_000)] = 256
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.1
    price_factor: Annotated[float, Field(ge=0, le=1)] = 1.0
