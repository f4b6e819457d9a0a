"""The pool learns from a worker's paths whether the worker generates text."""

from __future__ import annotations

import pytest

from budgeting.values import Message, Role
from gateway.backends.port import BackendState, Work
from gateway.contracts.values import Sampling
from gateway.health.probe import short_work
from tests.workers.raw_worker import RawWorker, answers, pool, refuses, until

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


async def test_the_test_of_a_pool_that_only_scores_is_a_score() -> None:
    ranking = {"results": [{"index": 0, "relevance_score": 0.5}], "usage": {"prompt_tokens": 4}}
    worker = RawWorker(
        [refuses(404, {"detail": "Not Found"}), refuses(200, ranking)], posts=frozenset({"/v1/rerank"})
    )
    async with pool(worker) as backend:
        work = Work("test", (), (Message(Role.USER, "test"),), Sampling(max_tokens=1))
        assert (await short_work(backend, work)).input_tokens == 4
        assert backend.state is BackendState.READY
    assert [one.path for one in worker.requests] == ["/v1/embeddings", "/v1/rerank"]


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
