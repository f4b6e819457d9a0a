"""Turns tokens into text, one at a time: only whole characters, never a stop string or a part of one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"
# A character has at most four bytes, so at most four tokens; a longer undecodable run will not become one.
_MAX_WINDOW_TOKENS = 32


class Detokenizer:
    """Turns a stream of token ids into text deltas that never end inside a character.

    It decodes a window of recent tokens: some whose text was already returned, for context (a decoder may
    treat the first token of its input differently), and the new ones. An incomplete character at the end
    waits for the bytes that complete it; if they never come, it is never returned. Special tokens have no
    text. Of the ``given`` tokens of a partial answer, only the incomplete end is returned later.
    """

    def __init__(self, tokenizer: Tokenizer, given: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context = 0  # tokens at the start of the window that serve as context only
        self._given = 0  # characters of the window's text returned so far
        for token_id in given[-2 * _MAX_WINDOW_TOKENS :]:  # earlier tokens are in no window any more
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty if the token ends inside a character."""
        self._window.append(token_id)
        text = self._decode(self._window)
        complete = text.rstrip(_UNFINISHED)
        delta = complete[self._given :]
        self._given += len(delta)
        if (complete == text and text) or len(self._window) > _MAX_WINDOW_TOKENS:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._given = len(self._decode(self._window).rstrip(_UNFINISHED))
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


@dataclass(slots=True)
class StopStrings:
    """Cuts a stream of text at the first stop string, and holds back an end that may be the start of one. If
    a stop string starts in text that was delivered before (``begin``), only its rest is cut.
    """

    stops: Sequence[str]
    matched: str | None = None
    _held: str = field(default="", init=False)
    _given: int = field(default=0, init=False)  # characters of the held text already delivered

    def begin(self, given: str) -> None:
        """Set the text that was delivered before this stream."""
        self._hold(given)
        self._given = len(self._held)

    def push(self, delta: str) -> str:
        """The text that can be delivered now. ``matched`` is set when a stop string is complete."""
        if not self.stops:
            return delta
        text, given = self._held + delta, self._given
        found = min(((at, stop) for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.matched = found
            self._held = ""
            return text[given:at]
        safe = self._hold(text)
        self._given = max(0, given - safe)
        return text[given:safe]

    def skip(self, delta: str) -> str:
        """The text, in which no stop string may begin."""
        text, self._given = self.flush() + delta, 0
        return text

    def flush(self) -> str:
        """The text that was held back; called when the sequence ends."""
        text, self._held = self._held[self._given :], ""
        return text

    def _hold(self, text: str) -> int:
        """Hold back the end of ``text`` that may be the start of a stop string; returns its position."""
        safe = len(text) - max((overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[safe:]
        return safe


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of an answer's tokens, without an incomplete character at its end."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text.rstrip(_UNFINISHED)
