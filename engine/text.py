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

    It decodes a window of recent tokens: some whose text was given, for context (a decoder may treat the
    first token of its input differently), and the new ones. Text from the first unreadable end on waits for
    the bytes that complete it; what is never completed is never given. Special tokens give no text. Of the
    ``given`` tokens of a partial answer, only the unfinished end comes out.
    """

    def __init__(self, tokenizer: Tokenizer, given: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context = 0  # tokens of the window whose text was complete before the last ones came
        self._given = 0  # characters of the window's text given so far
        for token_id in given[-2 * _MAX_WINDOW_TOKENS :]:  # what stood before is out of every window
            self.push(token_id)

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
    """Cuts a stream of text at the first stop string, and holds back an end that may begin one. Of a stop
    string that began in text given before (``begin``), the rest is cut.
    """

    stops: Sequence[str]
    matched: str | None = None
    _held: str = field(default="", init=False)
    _given: int = field(default=0, init=False)  # characters at the beginning of what is held

    def begin(self, given: str) -> None:
        """Text that was given before this stream."""
        self._hold(given)
        self._given = len(self._held)

    def push(self, delta: str) -> str:
        """The text that is safe to give. ``matched`` is set once a stop string is complete."""
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

    def flush(self) -> str:
        """What was held back, when the sequence ended for another reason."""
        text, self._held = self._held[self._given :], ""
        return text

    def _hold(self, text: str) -> int:
        """Holds the end of ``text`` back that may begin a stop string; returns where it begins."""
        safe = len(text) - max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[safe:]
        return safe


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of an answer's tokens, without the bytes of an unfinished character at its end."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text.rstrip(_UNFINISHED)
