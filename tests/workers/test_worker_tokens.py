"""Workers tokenize for the gateway, from a thread; one that does not answer is left alone for a while."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest

from budgeting.values import Message, Role, Tool, ToolCall, ToolKind
from gateway.backends.workers.client import Whole
from gateway.backends.workers.errors import ConnectFailed
from gateway.backends.workers.worker_tokens import MISSING_PAUSE_S, PAUSE_S, PoolTokens

ASKED = [Message(Role.USER, "hi")]


class Pool:
    """A pool that answers what a test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answer: Whole | Exception | None = Whole(200, b'{"count": 2, "tokens": [7, 8]}')
        self.asked: list[tuple[str, Any]] = []
        self.tokens = PoolTokens("qwen", self.ask, lambda: self.now)

    async def ask(self, path: str, body: bytes, timeout_s: float) -> Whole | None:
        self.asked.append((path, orjson.loads(body)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def chat(self, messages: list[Message] = ASKED, **changes: Any) -> tuple[int, ...] | None:
        given = {"tools": (), "kwargs": {}, **changes}
        return await asyncio.to_thread(self.tokens.chat, messages, **given)


async def test_a_conversation_is_tokenized_as_it_will_be_sent() -> None:
    pool = Pool()
    called = Message(
        Role.ASSISTANT, "", tool_calls=(ToolCall("call_1", "search", '{"q":"sea"}', ToolKind.FUNCTION),)
    )
    tool = Tool("search", parameters='{"type":"object"}')
    assert await pool.chat([*ASKED, called], tools=(tool,), kwargs={"enable_thinking": False}) == (7, 8)
    [(path, body)] = pool.asked
    assert path == "/tokenize"
    assert body["model"] == "qwen" and body["add_generation_prompt"] is True
    assert body["messages"][0] == {"role": "user", "content": "hi"}
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"q":"sea"}'}
    assert body["tools"] == [
        {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    ]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


async def test_raw_texts_and_ids_are_asked_for() -> None:
    pool = Pool()
    assert await asyncio.to_thread(pool.tokens.text, "a book", add_special_tokens=False) == (7, 8)
    pool.answer = Whole(200, json.dumps({"prompt": "a book"}).encode())
    assert await asyncio.to_thread(pool.tokens.decode, (7, 8)) == "a book"
    pool.answer = Whole(400, b"{}")
    with pytest.raises(ValueError, match="vocabulary"):
        await asyncio.to_thread(pool.tokens.decode, (1 << 30,))


async def test_a_llama_cpp_which_ignores_the_prompt_counts_nothing() -> None:
    """Its ``/tokenize`` takes ``content`` and answers any other request with 200 and no tokens."""
    pool = Pool()
    pool.answer = Whole(200, b'{"tokens":[]}')
    assert await pool.chat() is None
    assert pool.tokens.silent and pool.tokens.is_missing
    assert await pool.chat() is None
    assert len(pool.asked) == 1


async def test_a_text_of_no_tokens_is_no_reason_to_ask_no_more() -> None:
    pool = Pool()
    pool.answer = Whole(200, b'{"count": 0, "tokens": []}')
    assert await pool.chat() == ()
    assert not pool.tokens.silent


@pytest.mark.parametrize("answer", [ConnectFailed("refused"), Whole(500, b"")], ids=str)
async def test_a_worker_that_does_not_answer_is_left_alone_for_a_while(answer: Whole | Exception) -> None:
    pool = Pool()
    good, pool.answer = pool.answer, answer
    assert await pool.chat() is None
    assert pool.tokens.silent
    assert await pool.chat() is None
    assert len(pool.asked) == 1
    pool.now += PAUSE_S
    pool.answer = good
    assert await pool.chat() == (7, 8)


async def test_a_worker_that_returns_to_an_empty_pool_is_asked_at_once() -> None:
    pool = Pool()
    good, pool.answer = pool.answer, None
    assert await pool.chat() is None
    assert pool.tokens.silent
    pool.answer = good
    assert await pool.chat() == (7, 8)
    assert not pool.tokens.silent


async def test_a_server_without_the_path_is_asked_rarely() -> None:
    pool = Pool()
    pool.answer = Whole(404, b"not found")
    assert await pool.chat() is None
    pool.now += MISSING_PAUSE_S - 0.1
    assert await pool.chat() is None
    assert len(pool.asked) == 1 and pool.tokens.is_missing


@pytest.mark.parametrize("body", [b"", b"[]", b'{"tokens": "many"}', b'{"tokens": [1.5]}', b"\xff"])
async def test_what_is_no_list_of_ids_is_no_answer(body: bytes) -> None:
    pool = Pool()
    pool.answer = Whole(200, body)
    assert await pool.chat() is None


async def test_a_refused_conversation_is_no_reason_to_stop_asking() -> None:
    pool = Pool()
    good, pool.answer = pool.answer, Whole(400, b'{"error": "roles must alternate"}')
    assert await pool.chat() is None
    pool.answer = good
    assert await pool.chat() == (7, 8)


async def test_the_event_loop_never_waits_for_a_worker() -> None:
    pool = Pool()
    assert pool.tokens.text("a book", add_special_tokens=True) is None
    assert not pool.asked
