"""Which configuration file a command reads."""

from __future__ import annotations

import os
from pathlib import Path


def config_path(given: Path | None) -> Path | None:
    """The configuration file to use: the given one, SLUICE_CONFIG, ./sluice.yaml, or none."""
    if given is not None:
        return given
    if os.environ.get("SLUICE_CONFIG"):
        return Path(os.environ["SLUICE_CONFIG"])
    return Path("sluice.yaml") if Path("sluice.yaml").is_file() else None
