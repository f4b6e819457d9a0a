"""The pool learns from a worker's paths whether the worker generates text."""

from __future__ import annotations

import pytest

from tests.workers.raw_worker import RawWorker, answers, pool, until

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("posts", "generates"),
    [
        ({CHAT, PLAIN, "/v1/embeddings"}, True),
        ({PLAIN, "/v1/score"}, True),
        ({"/v1/embeddings"}, False),
        ({"/v1/rerank", "/v1/score"}, False),
        ({"/v1/audio/transcriptions"}, False),
        (set(), True),  # it may refuse a GET with another status than 405
    ],
)
async def test_a_worker_that_has_only_paths_of_other_work_does_not_generate(
    posts: set[str], generates: bool
) -> None:
    async with pool(RawWorker([answers("a")], posts=frozenset(posts))) as backend:
        assert backend.generates is generates


async def test_a_pool_generates_while_one_of_its_workers_does() -> None:
    silent = RawWorker([answers("a")], posts=frozenset({"/v1/embeddings"}))
    chat = RawWorker([answers("a")], posts=frozenset({CHAT}))
    async with pool(silent, chat) as backend:
        assert backend.generates
        # Another server replaces it at the same address.
        chat.posts = frozenset({"/v1/embeddings"})
        chat.healthy = False
        await until(lambda: not all(one.health.in_service for one in backend._workers.values()))
        chat.healthy = True
        await until(lambda: not backend.generates)
