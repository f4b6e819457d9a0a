"""What ``state.url`` may say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from gateway.config.errors import ConfigError

ALLOWED = "sqlite:///FILE, redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://…, memory://"
_SQLITE = "sqlite:///"


class StoreKind(StrEnum):
    """What is behind a url."""

    SQLITE = "sqlite"
    REDIS = "redis"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class StateUrl:
    """A url that was understood.

    Args:
        kind: what is behind it.
        url: as it was given, with its password.
        shown: without it, for eyes and logs.
        path: the file, of SQLite.
    """

    kind: StoreKind
    url: str
    shown: str
    path: Path | None = None

    def __repr__(self) -> str:
        return f"StateUrl({self.shown!r})"


def parse_state_url(url: str, *, key: str = "state.url") -> StateUrl:
    """Understand ``state.url``, or the url that another ``key`` holds.

    Raises:
        ConfigError: it is none of what is allowed; the message shows no password.
    """
    if url.startswith(_SQLITE):
        name = url.removeprefix(_SQLITE)
        if not name or name.startswith(":memory:") or "?" in name:
            raise ConfigError(f"{key}: given {url!r}; allowed: {ALLOWED}")
        return StateUrl(StoreKind.SQLITE, url, url, Path(name))
    if url == "memory://":
        return StateUrl(StoreKind.MEMORY, url, url)
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("redis", "rediss") and bool(parts.hostname)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{key}: given a url that cannot be read; allowed: {ALLOWED}") from None
    if not known:
        raise ConfigError(f"{key}: given {parts.scheme or '(no scheme)'}://…; allowed: {ALLOWED}")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    # The query may hold a password too.
    shown = f"{parts.scheme}://{host}:{port or 6379}{parts.path.rstrip('/')}"
    return StateUrl(StoreKind.REDIS, url, shown)
