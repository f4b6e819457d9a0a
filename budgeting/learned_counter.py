"""Counts tokens for a model whose tokenizer cannot be read here: asks its workers, else estimates."""

import hashlib
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

from msgspec import structs

from budgeting.counting import NEVER_INLINE_CHARS, ChatTokenizer, EncodedChat
from budgeting.errors import NoTokenizer
from budgeting.estimating import EstimatingCounter, rough_text_tokens, rough_tokens
from budgeting.template import GENERATES, split_ending
from budgeting.token_cache import TokenCache
from budgeting.values import NO_KWARGS, Message, Role, Tool

CACHE_BYTES = 4 * 1024 * 1024
# Bytes of an id in a tuple, and of an entry's key.
_ID_BYTES, _KEY_BYTES = 8, 64
# How many times as fast as `tokenizers` an estimate is: 0.07 µs a character.
_SPEED = 5
_ANCHOR = Message(Role.USER, "x")

T = TypeVar("T")


class WorkersTokens(Protocol):
    """The tokenizer of a model's workers. Blocks, so it is never called on the event loop.

    A method returns ``None`` when no worker can answer now, or the worker refuses the conversation.
    """

    @property
    def silent(self) -> bool:
        """Whether no worker can tokenize now."""

    @property
    def is_missing(self) -> bool:
        """Whether the workers were found to have no such paths; they are asked again rarely."""

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool],
        kwargs: Mapping[str, object],
    ) -> tuple[int, ...] | None:
        """Ids of a conversation."""

    def text(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...] | None:
        """Ids of a raw text."""

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """The text of ids. Raises ValueError for an id outside the vocabulary."""


class LearnedCounter:
    """Counts as a :class:`budgeting.counting.ChatTokenizer` does, without the model's tokenizer.

    The ``workers`` count a conversation; when they cannot answer, or there are none, it is estimated. The ids
    of an estimated conversation stand for no text, but equal beginnings have equal ids: backends of the model
    must be sent messages, never these ids. Raw texts are not estimated, since their ids are sent to the
    backend. Thread-safe; may block.

    Args:
        estimates: learns from each count of the workers, and from :meth:`learn`.
        workers: ``None``: all conversations are estimated.
    """

    per_message = False

    def __init__(self, model: str, estimates: EstimatingCounter, workers: WorkersTokens | None) -> None:
        self._model = model
        self._estimates = estimates
        self._workers = workers
        # 0: with workers nothing is counted on the event loop, since asking a worker blocks.
        self.speed = 1 if workers is None else 0
        self.vocabulary = 1 << 31
        self._cache: TokenCache[tuple[int, ...]] = TokenCache(CACHE_BYTES)

    @property
    def encoder(self) -> str:
        """The method of counting, for operators; with the margin of an estimate."""
        estimate = f"an estimate (±{self._estimates.margin(self._model):.0%})"
        if self._workers is None:
            return estimate
        return f"{estimate}: no worker tokenizes" if self._workers.silent else "the workers' /tokenize"

    def learn(self, messages: Sequence[Message], tools: Sequence[Tool], reported: int) -> None:
        """Learn from the prompt tokens that a worker reported; only conversations of texts alone count."""
        if messages and not any(message.parts for message in messages):
            self._estimates.learn(self._model, _shown(messages, tools), reported)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> tuple[int, ...]:
        """Ids of the conversation from the workers. Raises NoTokenizer."""
        return self._had(self._asked(messages, tools, kwargs))

    def encode_parts(
        self,
        messages: Sequence[Message],
        cuts: Sequence[int],
        *,
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> EncodedChat:
        estimated = self._estimated(messages, cuts, tools, kwargs)
        ids = self._asked(messages, tools, kwargs)
        if ids is None:
            return estimated
        whole = max(1, len(estimated.token_ids))
        ends: dict[int, int] = {}
        for cut, share in dict(zip(cuts, estimated.ends, strict=True)).items():
            end = self._end(messages[:cut], ids, tools, kwargs)
            ends[cut] = share * len(ids) // whole if end is None else end
        return EncodedChat(ids, tuple(accumulate((ends[cut] for cut in cuts), max)), messages)

    def as_sent(self, messages: Sequence[Message], opening: int) -> Sequence[Message]:
        """The conversation unchanged: its chat template is not known here."""
        return messages

    def message_tokens(self, message: Message) -> int:
        return self._sized(rough_tokens((message,)) - rough_tokens(()))

    def tool_tokens(
        self, tools: tuple[Tool, ...], kwargs: Mapping[str, object], *, system: bool
    ) -> tuple[int, int]:
        if not tools:
            return 0, 0
        with_tools, bare = [
            len(self.encode_parts([_ANCHOR], (), tools=given, kwargs=kwargs).token_ids)
            for given in (tools, ())
        ]
        added = max(0, with_tools - bare)
        return added, added

    def text_tokens(self, text: str) -> int:
        return self._sized(rough_text_tokens(text))

    def unseen_chars(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Cost of encoding, in characters of text; asking a worker must never happen on the event loop."""
        if self._workers is not None:
            return NEVER_INLINE_CHARS
        return sum(len(text) for one in _shown(messages, tools) for text in one.texts) // _SPEED

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a raw text. Raises NoTokenizer."""
        if not text:
            return ()
        ids = None
        if self._workers is not None:
            ids = self._workers.text(text, add_special_tokens=add_special_tokens)
        return self._had(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._had(None if self._workers is None else self._workers.decode(token_ids))

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Always raises ValueError: the vocabulary is not known here."""
        raise ValueError(f"the tokenizer of {self._model} is not readable here")

    def token_bytes(self, token_id: int) -> bytes:
        """Always empty: the vocabulary is not known here."""
        return b""

    text_bytes = token_bytes

    def unknown_id(self, token_ids: Sequence[int]) -> int | None:
        """The first id that no vocabulary has; a worker itself refuses ids outside its own vocabulary."""
        return next((one for one in token_ids if not 0 <= one < self.vocabulary), None)

    def _had(self, value: T | None) -> T:
        if value is None:
            raise NoTokenizer(self._model, later=self._workers is not None and not self._workers.is_missing)
        return value

    def _sized(self, rough: float) -> int:
        return math.ceil(rough * self._estimates.factor(self._model))

    def _asked(
        self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: Mapping[str, object]
    ) -> tuple[int, ...] | None:
        if self._workers is None or not messages:
            return None
        key = _digest(messages, tools, kwargs)
        ids = self._cache.get(key)
        if ids is None:
            ids = self._workers.chat(messages, tools=tools, kwargs=kwargs)
            if ids is not None:
                self._cache.put(key, ids, _ID_BYTES * len(ids) + _KEY_BYTES)
                if not split_ending(kwargs)[0]:
                    self.learn(messages, tools, len(ids))
        return ids

    def _end(
        self,
        messages: Sequence[Message],
        ids: tuple[int, ...],
        tools: Sequence[Tool],
        kwargs: Mapping[str, object],
    ) -> int | None:
        """The number of ``ids`` that stand for the first ``messages``; ``None`` if no worker counts these."""
        if not messages:
            return 0
        begun = self._asked(messages, tools, {**split_ending(kwargs)[1], GENERATES: False})
        if begun is None or ids[: len(begun)] == begun:
            return None if begun is None else len(begun)
        differ = (at for at, (one, other) in enumerate(zip(begun, ids, strict=False)) if one != other)
        return next(differ, min(len(begun), len(ids)))

    def _estimated(
        self,
        messages: Sequence[Message],
        cuts: Sequence[int],
        tools: Sequence[Tool],
        kwargs: Mapping[str, object],
    ) -> EncodedChat:
        """The estimate. A message's ids depend on all messages up to it, since answers are cached by ids."""
        factor = self._estimates.factor(self._model)
        sizes = accumulate((rough_tokens((one,)) - rough_tokens(()) for one in messages), initial=0.0)
        before = rough_tokens(_shown((), tools))
        sums = [math.ceil((before + size) * factor) for size in sizes]
        state = hashlib.blake2b(_digest((), tools, kwargs))
        ids = _stand_ins(state.digest(), sums[0])
        for message, begin, end in zip(messages, sums, sums[1:], strict=False):
            state.update(_digest((message,), (), NO_KWARGS))
            ids += _stand_ins(state.digest(), end - begin)
        return EncodedChat(tuple(ids), tuple([sums[cut] if cut or tools else 0 for cut in cuts]), messages)


PromptCounter = ChatTokenizer | LearnedCounter  # counts the prompts of one model


def _stand_ins(seed: bytes, count: int) -> list[int]:
    return [one & 0x7FFF_FFFF for one in array("I", hashlib.shake_128(seed).digest(4 * count))]


def _shown(messages: Sequence[Message], tools: Sequence[Tool]) -> Sequence[Message]:
    """The conversation, and a message with the tools' texts."""
    if not tools:
        return messages
    texts = (text for tool in tools for text in structs.astuple(tool) if isinstance(text, str))
    return (*messages, Message(Role.SYSTEM, "\n".join(texts)))


def _digest(messages: Sequence[Message], tools: Sequence[Tool], kwargs: Mapping[str, object]) -> bytes:
    given = [list(map(structs.astuple, messages)), list(map(structs.astuple, tools)), dict(kwargs)]
    data = json.dumps(given, sort_keys=True, default=repr).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()
