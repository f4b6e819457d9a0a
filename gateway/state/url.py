"""The values of ``state.url``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from gateway.config.errors import ConfigError

ALLOWED = "sqlite:///FILE, redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://…, memory://"
_SQLITE = "sqlite:///"


@dataclass(frozen=True, slots=True)
class StateUrl:
    """A parsed url.

    Args:
        url: as configured, with its password.
        shown: without the password, for logs.
        key: the setting that has it.
        path: the file, for SQLite.
    """

    kind: Literal["sqlite", "redis", "memory"]
    url: str
    shown: str
    key: str
    path: Path | None = None

    def __repr__(self) -> str:
        return f"StateUrl({self.shown!r})"


def parse_state_url(url: str, *, key: str = "state.url") -> StateUrl:
    """Parse ``state.url``, or the url of another ``key``.

    Raises ConfigError for an invalid url; the message shows no password.
    """
    if url.startswith(_SQLITE):
        name = url.removeprefix(_SQLITE)
        if not name or name.startswith(":memory:") or "?" in name:
            raise ConfigError(f"{key}: given {url!r}; allowed: {ALLOWED}")
        return StateUrl("sqlite", url, url, key, Path(name))
    if url == "memory://":
        return StateUrl("memory", url, url, key)
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("redis", "rediss") and bool(parts.hostname)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{key}: given a url that cannot be read; allowed: {ALLOWED}") from None
    if not known:
        raise ConfigError(f"{key}: given {parts.scheme or '(no scheme)'}://…; allowed: {ALLOWED}")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    # The query may contain a password too.
    shown = f"{parts.scheme}://{host}:{port or 6379}{parts.path.rstrip('/')}"
    return StateUrl("redis", url, shown, key)
