"""Replies kept under an idempotency key, in a real SQLite file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy.exc import SQLAlchemyError

from gateway.config import ConfigError
from gateway.idempotency_store import KEEP_S, SqliteIdempotencyStore
from gateway.ports import StoredReply

REPLY = StoredReply(200, "application/json", b'{"a":1}')


class Time:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


async def test_a_reply_is_kept_for_a_day_per_tenant_and_key(tmp_path: Path) -> None:
    time = Time()
    store = SqliteIdempotencyStore(f"sqlite:///{tmp_path}/s.db", unix_time=time)
    await store.open()
    await store.put("acme", "k", "print", REPLY)
    assert await store.get("acme", "k") == ("print", REPLY)
    assert await store.get("other", "k") is None
    assert await store.get("acme", "other") is None
    await store.put("acme", "k", "second", StoredReply(200, "text/plain", b"x"))
    assert await store.get("acme", "k") == ("print", REPLY), "the first reply stays"
    time.now += KEEP_S + 1
    assert await store.get("acme", "k") is None
    await store.put("acme", "k", "third", REPLY)
    assert await store.get("acme", "k") == ("third", REPLY)
    await store.close()


async def test_replies_survive_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        store = SqliteIdempotencyStore(f"sqlite:///{tmp_path}/s.db", unix_time=Time())
        await store.open()
        await store.put("acme", "k", "print", REPLY)
        assert await store.get("acme", "k") == ("print", REPLY)
        await store.close()


async def test_a_store_that_is_down_says_so_and_opens_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = SqliteIdempotencyStore(f"sqlite:///{tmp_path}/file/s.db", unix_time=Time())
    await store.open()
    assert store.healthy is False
    with pytest.raises(SQLAlchemyError):
        await store.get("acme", "k")
    with pytest.raises(SQLAlchemyError):
        await store.put("acme", "k", "print", REPLY)
    assert store.healthy is False
    await store.close()


async def test_it_is_healthy_again_when_the_lock_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.idempotency_store.BUSY_TIMEOUT_MS", 50)
    store = SqliteIdempotencyStore(f"sqlite:///{tmp_path}/s.db", unix_time=Time())
    await store.open()
    lock = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    lock.execute("begin immediate")
    with pytest.raises(SQLAlchemyError):
        await store.put("acme", "k", "print", REPLY)
    assert store.healthy is False
    lock.execute("rollback")
    await store.put("acme", "k", "print", REPLY)
    assert store.healthy is True
    lock.close()
    await store.close()


def test_another_kind_of_store_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"state\.url.*sqlite:///FILE"):
        SqliteIdempotencyStore("redis://localhost", unix_time=Time())
