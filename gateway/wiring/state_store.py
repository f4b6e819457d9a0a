"""Builds the stores of a state url. Redis is imported only if it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.config.errors import ConfigError
from gateway.state.idempotency import IdempotencyStore
from gateway.state.idempotency_sqlite import SqliteIdempotencyStore
from gateway.state.limits import LimitStore
from gateway.state.limits_sqlite import SqliteLimitStore
from gateway.state.memory import MemoryStateStore
from gateway.state.port import StateStore
from gateway.state.sqlite_store import SqliteStateStore
from gateway.state.url import StateUrl

if TYPE_CHECKING:
    from redis.asyncio import Redis


def make_state_store(
    url: StateUrl, *, namespace: str, unix_time: Callable[[], float], poll_s: float = 1.0
) -> StateStore:
    """Build the state store of ``url``. Raises ConfigError if a required package is missing."""
    if url.kind == "memory":
        return MemoryStateStore(unix_time=unix_time, poll_s=poll_s)
    if url.path is not None:
        return SqliteStateStore(url.path, unix_time=unix_time, poll_s=poll_s)
    client = connect(url.url, url.key)
    from gateway.state.redis_store import RedisStateStore

    return RedisStateStore(client, shown=url.shown, namespace=namespace, unix_time=unix_time, poll_s=poll_s)


def make_idempotency_store(
    url: StateUrl, *, namespace: str, unix_time: Callable[[], float]
) -> IdempotencyStore:
    """Build the store of idempotent replies. Raises ConfigError if a required package is missing."""
    if url.kind != "redis":
        file = Path(":memory:") if url.path is None else _beside(url.path, ".replies")
        return SqliteIdempotencyStore(file, unix_time=unix_time)
    client = connect(url.url, url.key)
    from gateway.state.idempotency_redis import RedisIdempotencyStore

    return RedisIdempotencyStore(client, namespace=namespace, unix_time=unix_time)


def make_limit_store(url: StateUrl, *, namespace: str, unix_time: Callable[[], float]) -> LimitStore | None:
    """Build the store of keys' limits; ``None`` for memory, which processes do not share.

    Raises ConfigError if a required package is missing.
    """
    if url.kind == "memory":
        return None
    if url.path is not None:
        return SqliteLimitStore(_beside(url.path, ".limits"), unix_time=unix_time)
    client = connect(url.url, url.key)
    from gateway.state.limits_redis import RedisLimitStore

    return RedisLimitStore(client, namespace=namespace)


def copies_folder(url: StateUrl, *, namespace: str, cache_dir: str | None) -> Path | None:
    """Return the folder for local copies of the streams; ``None`` for memory, which needs none.

    Args:
        cache_dir: the configured folder, in which each store and namespace has its own; unset: next to the
            SQLite file, or in the user's cache.
    """
    if url.kind == "memory":
        return None
    if url.path is not None and cache_dir is None:
        return _beside(url.path, ".streams")
    named = str(url.path.absolute()) if url.path is not None else url.shown
    digest = hashlib.sha256(f"{named} {namespace}".encode()).hexdigest()[:16]
    return Path(cache_dir or "~/.cache/sluice/state").expanduser() / digest


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}{suffix}")


def connect(url: str, key: str, **options: int) -> Redis:
    """Make a client for ``url``, the value of the setting ``key``. Raises ConfigError."""
    try:
        from gateway.state import redis_client
    except ImportError:
        raise ConfigError(f"{key} needs the client of Redis: pip install 'sluice-gateway[redis]'") from None
    return redis_client.connect(url, key=key, **options)
