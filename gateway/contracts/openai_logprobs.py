"""Log-probabilities in the shapes of OpenAI's two paths."""

import codecs
import math
from collections.abc import Iterable

from typing_extensions import TypedDict

from gateway.contracts.values import TokenLogprob


class TopLogprob(TypedDict):
    """A token that could have come; ``bytes`` is exact where the text is half a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token that came, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """``logprobs`` of a chat's choice."""

    content: list[ChatLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """``logprobs`` of a text completion's choice: parallel lists, an item a token.

    ``text_offset`` is where the token's text begins in the choice's, in characters. An echoed prompt's first
    token has no probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Offsets:
    """Where each token of one text begins, in characters, though a character may be spread over tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def of(self, data: bytes) -> int:
        """The place of the next token, whose bytes are ``data``."""
        place = self._at
        self._at += len(self._decoder.decode(data))
        return place


def chat_logprobs(entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The tokens of a chat's choice, or of one piece of it."""
    content: list[ChatLogprob] = [
        {**_told(entry), "top_logprobs": [_told(one) for one in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Iterable[TokenLogprob], offsets: Offsets) -> CompletionLogprobs:
    """The tokens of a completion's choice, or of one piece of it; ``offsets`` continues from piece to piece.

    As with OpenAI, the token that came is among its ``top_logprobs`` even when it is none of the likely ones.
    """
    entries = tuple(entries)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [None if math.isnan(entry.logprob) else entry.logprob for entry in entries],
        "top_logprobs": [None if math.isnan(entry.logprob) else _by_text(entry) for entry in entries],
        "text_offset": [offsets.of(entry.data) for entry in entries],
    }


def _by_text(entry: TokenLogprob) -> dict[str, float]:
    likely: dict[str, float] = {}
    for one in entry.top:
        likely.setdefault(one.text, one.logprob)  # halves of characters all look the same
    return {**likely, entry.text: entry.logprob}


def _told(entry: TokenLogprob) -> TopLogprob:
    return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.data)}
