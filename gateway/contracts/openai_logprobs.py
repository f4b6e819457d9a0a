"""Log-probabilities in the formats of OpenAI's chat and text completions."""

import codecs
import math
from collections.abc import Iterable, Sequence

from typing_extensions import TypedDict

from gateway.contracts.values import TokenLogprob


class TopLogprob(TypedDict):
    """An alternative token; ``bytes`` is exact even if the token is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A generated token, and the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """``logprobs`` of a chat's choice."""

    content: list[ChatLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """``logprobs`` of a text completion's choice: parallel lists with an item per token.

    ``text_offset`` is where the token's text begins in the choice's text, in characters. An echoed prompt's
    first token has no probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Offsets:
    """Computes where each token of a text begins, in characters; tokens may split a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def of(self, data: bytes) -> int:
        """The offset of the next token, whose bytes are ``data``."""
        place = self._at
        self._at += len(self._decoder.decode(data))
        return place


def chat_logprobs(entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """``logprobs`` of a chat's choice, or of one piece of it."""
    content: list[ChatLogprob] = [
        {**_logprob_body(entry), "top_logprobs": [_logprob_body(one) for one in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob], offsets: Offsets) -> CompletionLogprobs:
    """``logprobs`` of a text completion's choice, or of a piece; all pieces of it share ``offsets``.

    As at OpenAI, the generated token is in its ``top_logprobs`` even if it is not one of the most likely.
    """
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [None if math.isnan(entry.logprob) else entry.logprob for entry in entries],
        "top_logprobs": [None if math.isnan(entry.logprob) else _by_text(entry) for entry in entries],
        "text_offset": [offsets.of(entry.data) for entry in entries],
    }


def _by_text(entry: TokenLogprob) -> dict[str, float]:
    likely: dict[str, float] = {}
    for one in entry.top:
        likely.setdefault(one.text, one.logprob)  # parts of characters all have the same text
    return {**likely, entry.text: entry.logprob}


def _logprob_body(entry: TokenLogprob) -> TopLogprob:
    return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.data)}
