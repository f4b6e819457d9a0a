"""Text from tokens, one at a time: whole characters only, and never a stop string or a part of one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"
# A character has at most four bytes, so at most four tokens; a longer unreadable run is not a character to
# be.
_MAX_WINDOW_TOKENS = 32


class Detokenizer:
    """Turns a stream of token ids into text deltas that never end inside a character.

    It decodes a window of recent tokens: some whose text has been given, for context (a decoder may treat the
    first token of its input differently), and the new ones. Text from the first unreadable end on is held
    back until the bytes that complete it come; what is never completed is never given. Special tokens give no
    text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context = 0  # tokens of the window whose text was complete before the last ones came
        self._given = 0  # characters of the window's text given so far

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty when it only begins a character."""
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
    """Cuts a stream of text at the first stop string, and holds back an end that may begin one."""

    stops: Sequence[str]
    matched: str | None = None
    _held: str = field(default="", init=False)

    def push(self, delta: str) -> str:
        """The text that is safe to give. ``matched`` is set once a stop string is complete."""
        if not self.stops:
            return delta
        text = self._held + delta
        found = min(((at, stop) for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.matched = found
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self.stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when the sequence ended for another reason."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
