"""Published prompts of earlier versions of Sluice: a table in the SQLite file of ``state.url``."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path

from gateway.prompts.published import Published, StoreUnreachable

# Longest wait for another process that writes.
BUSY_TIMEOUT_S = 2.0


def table_of(path: Path) -> Callable[[], Awaitable[Mapping[str, Published]]]:
    """Reads the table in ``path``, if there is one; the returned function raises StoreUnreachable."""

    async def read() -> Mapping[str, Published]:
        return await asyncio.to_thread(_read, path)

    return read


def _read(path: Path) -> Mapping[str, Published]:
    if not path.exists():
        return {}
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)) as connection:
            there = connection.execute(
                "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'published_prompts'"
            ).fetchone()
            if there is None:
                return {}
            rows = connection.execute("SELECT id, sha256, published_at FROM published_prompts").fetchall()
    except sqlite3.Error as error:
        raise StoreUnreachable(type(error).__name__) from error
    return {name: Published(sha256, at) for name, sha256, at in rows}
