"""Reads the keys that sign or encrypt, from a file or else from an environment variable."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gateway.config.errors import ConfigError

MIN_SECRET_CHARS: Final = 32


def read_keys(
    key: str, file: str | Path | None, variable: str, environ: Mapping[str, str]
) -> tuple[bytes, ...]:
    """Return the keys in ``file`` (of the setting ``key``), else those in the variable, or none if unset.

    There is one key per line, the newest first. Raises ConfigError; its message never contains a key.
    """
    where, text = variable if file is None else f"{key}: {file}", environ.get(variable)
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{where}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if not text and file is None:
        return ()
    keys = (text or "").split()
    shortest = min(map(len, keys), default=0)
    if shortest < MIN_SECRET_CHARS:
        raise ConfigError(
            f"{where}: a key of {shortest} characters; allowed: {MIN_SECRET_CHARS} or more; "
            "make one with: openssl rand -hex 32"
        )
    return tuple(key.encode() for key in keys)
