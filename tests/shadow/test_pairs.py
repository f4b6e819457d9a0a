"""The table of pairs, in real databases."""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from accounting.errors import LedgerUnavailable
from accounting.shadow_pairs import ShadowPairStore
from accounting.shadow_values import ShadowPair
from tests.shadow.test_report import pairs

NOW = 1_700_000_100.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ShadowPairStore]:
    made = ShadowPairStore(f"sqlite+aiosqlite:///{tmp_path}/ledger.db", keep_pairs=50, keep_s=1_000.0)
    yield made
    await made.close()


async def test_pairs_come_back_as_they_went_in_newest_first(store: ShadowPairStore) -> None:
    made = [replace(one, likeness=0.25) for one in pairs(10)]
    made[3] = replace(
        made[3], shadow=replace(made[3].shadow, text="nul \x00 and 漫画 \ud800", checks={"a": None})
    )
    await store.write(made, now=NOW)
    assert await store.newest(100) == made[::-1]
    assert await store.newest(2) == made[:-3:-1]


async def test_a_pair_is_written_once(store: ShadowPairStore) -> None:
    await store.write(pairs(3), now=NOW)
    await store.write(pairs(4), now=NOW)
    assert len(await store.newest(100)) == 4


async def test_pairs_are_found_by_route_and_time(store: ShadowPairStore) -> None:
    made = pairs(6)
    made[0] = replace(made[0], route="other")
    await store.write(made, now=NOW)
    assert await store.newest(100, route="other") == [made[0]]
    assert await store.newest(100, since=made[4].at) == [made[5], made[4]]


async def test_the_oldest_are_forgotten_beyond_the_bound_and_beyond_their_days(
    store: ShadowPairStore,
) -> None:
    made = pairs(80)
    await store.write(made, now=NOW)
    assert await store.newest(100) == made[:29:-1]
    await store.write((), now=made[60].at + 1_000.0)
    assert await store.newest(100) == made[:59:-1]
    await store.write((), now=math.inf)
    assert await store.newest(100) == []


async def test_an_unavailable_database_is_reported_without_its_url(tmp_path: Path) -> None:
    store = ShadowPairStore(f"sqlite+aiosqlite:///{tmp_path}/none/ledger.db", keep_pairs=5, keep_s=1.0)
    for call in (store.newest(5), store.write(_one(), now=NOW)):
        with pytest.raises(LedgerUnavailable) as caught:
            await call
        assert str(tmp_path) not in str(caught.value)
    await store.close()


@pytest.mark.slow
async def test_a_database_that_does_not_answer_is_waited_for_as_long_as_allowed() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"postgresql+asyncpg://user@127.0.0.1:{silent.getsockname()[1]}/ledger"
        store = ShadowPairStore(url, keep_pairs=5, keep_s=1.0, timeout_s=0.2)
        for call in (store.newest(5), store.write(_one(), now=NOW)):
            with pytest.raises(LedgerUnavailable, match=r"no answer within 0\.2 s"):
                await call
        await store.close()


def _one() -> list[ShadowPair]:
    return pairs(1)
