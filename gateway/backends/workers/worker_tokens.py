"""The tokenizer of a pool's workers, by ``/tokenize`` and ``/detokenize``, which vLLM and Sluice have."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import msgspec
import orjson

from budgeting.template import GENERATES, split_ending
from budgeting.values import Message, Tool
from gateway.backends.tool_bodies import message_body, tool_bodies
from gateway.backends.workers.client import Whole
from gateway.backends.workers.errors import TransportError
from gateway.backends.workers.tokenizer_check import TOKENIZE_PATH, read_tokens

DETOKENIZE_PATH = "/detokenize"
# Seconds: longest time for an answer; how long no worker is asked after an answer that did not come, and
# after a worker without such a path.
ASK_TIMEOUT_S = 2.0
PAUSE_S = 10.0
MISSING_PAUSE_S = 300.0

Ask = Callable[[str, bytes, float], Awaitable[Whole | None]]
"""Asks a worker in service, by path, body and longest time in seconds; ``None``: none is in service."""


class _Text(msgspec.Struct):
    prompt: str


_read_text = msgspec.json.Decoder(_Text).decode


class PoolTokens:
    """Implements :class:`budgeting.learned_counter.WorkersTokens`. Thread-safe; made on the event loop.

    If a worker does not answer in time no worker is asked for ``PAUSE_S``, so that prompts do not wait. One
    that returns to a pool without any is asked at once.
    """

    def __init__(self, model: str, ask: Ask, clock: Callable[[], float]) -> None:
        self._model = model
        self._ask = ask
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._paused_until = float("-inf")
        self._none_in_service = False  # when one was last asked
        self.is_missing = False

    @property
    def silent(self) -> bool:
        return self._none_in_service or self._pauses

    @property
    def _pauses(self) -> bool:
        return self._clock() < self._paused_until

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool],
        kwargs: Mapping[str, object],
    ) -> tuple[int, ...] | None:
        """Ids of a conversation; ``None`` when no worker answers now, or the worker refuses it."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [
                message_body(one.without_parts if one.parts else one, reasoning="reasoning", custom=False)
                for one in messages
            ],
            GENERATES: True,
        }
        if tools:
            body["tools"] = tool_bodies(tools, custom=False)
        ending, variables = split_ending(kwargs)
        body |= ending
        if variables:
            body["chat_template_kwargs"] = dict(variables)
        return self._ids(body)

    def text(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...] | None:
        """Ids of a raw text; ``None`` when no worker answers now."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": add_special_tokens}
        return self._ids(body)

    def _ids(self, body: Mapping[str, Any]) -> tuple[int, ...] | None:
        answer = self._waited(TOKENIZE_PATH, body)
        ids = None if answer is None else answer.read(read_tokens)
        if ids is None and answer is not None and answer.status == 200:
            self._missing()  # it has another path of this name
        return ids

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """The text of ids; ``None`` when no worker answers now. Raises ValueError: an unknown id."""
        answer = self._waited(DETOKENIZE_PATH, {"model": self._model, "tokens": list(token_ids)})
        if answer is None:
            return None
        if answer.status in (400, 422):
            raise ValueError("an id outside the vocabulary")
        read = answer.read(_read_text)
        return None if read is None else read.prompt

    def _waited(self, path: str, body: Mapping[str, Any]) -> Whole | None:
        if self._pauses or threading.get_ident() == self._loop_thread:
            return None
        asked = asyncio.run_coroutine_threadsafe(self._answered(path, orjson.dumps(body)), self._loop)
        try:
            return asked.result(2 * ASK_TIMEOUT_S)
        except (CancelledError, TimeoutError):  # the gateway stops
            return None

    async def _answered(self, path: str, body: bytes) -> Whole | None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                answer = await self._ask(path, body, ASK_TIMEOUT_S)
        except (TransportError, TimeoutError):
            self._paused_until = self._clock() + PAUSE_S
            return None
        self._none_in_service = answer is None
        if answer is None:
            return None
        if answer.status >= 500:
            self._paused_until = self._clock() + PAUSE_S
            return None
        self.is_missing = False
        if answer.status in (404, 405):
            self._missing()
        return answer

    def _missing(self) -> None:
        self.is_missing = True
        self._paused_until = self._clock() + MISSING_PAUSE_S
