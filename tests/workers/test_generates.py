"""The pool learns from a worker's paths whether the worker generates text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest

from budgeting.values import Message, Role
from gateway.backends.port import BackendState, Work
from gateway.contracts.values import Sampling
from gateway.health.probe import short_work
from resilience.failures import BackendFailure
from tests.workers.raw_worker import RawWorker, Request, answers, pool, until

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


@pytest.mark.parametrize("status", [200, 403, 429, 500])
async def test_a_path_for_chats_that_answers_a_get_with_anything_but_404_generates(status: int) -> None:
    worker = RawWorker([answers("a")], posts=frozenset({"/v1/embeddings"}), statuses={CHAT: status})
    async with pool(worker) as backend:
        assert backend.generates


RANKING = {"results": [{"index": 0, "relevance_score": 0.5}], "usage": {"prompt_tokens": 4}}
SCORES = {"data": [{"index": 0, "score": 0.5}], "usage": {"prompt_tokens": 4}}
TRANSCRIPT = {"text": "", "usage": {"type": "tokens", "input_tokens": 4, "output_tokens": 0}}


class ScoresOrSpeech(RawWorker):
    """Has one path, which it answers with ``reply``."""

    def __init__(self, path: str, reply: Mapping[str, object]) -> None:
        super().__init__([self.answer], posts=frozenset({path}))
        self.reply = reply

    async def read_body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        return await reader.readexactly(int(headers.get("content-length", "0")))

    async def answer(self, request: Request) -> None:
        known = request.path in self.posts
        await request.whole(200 if known else 404, json.dumps(self.reply if known else {}).encode())


@pytest.mark.parametrize(
    ("path", "reply"),
    [("/v1/rerank", RANKING), ("/v1/score", SCORES), ("/v1/audio/transcriptions", TRANSCRIPT)],
)
async def test_the_test_of_a_pool_that_only_scores_or_transcribes_is_that_work(
    path: str, reply: Mapping[str, object]
) -> None:
    async with pool(ScoresOrSpeech(path, reply)) as backend:
        work = Work("test", (), (Message(Role.USER, "test"),), Sampling(max_tokens=1))
        assert (await short_work(backend, work)).input_tokens == 4
        assert backend.state is BackendState.READY


async def test_the_test_of_a_pool_without_any_path_fails() -> None:
    async with pool(ScoresOrSpeech("/v1/embeddings", {})) as backend:
        work = Work("test", (), (Message(Role.USER, "test"),), Sampling(max_tokens=1))
        with pytest.raises(BackendFailure):
            await short_work(backend, work)


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
