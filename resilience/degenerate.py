"""Detects degenerate answers, repetition or replacement characters, in constant time a token; sans-I/O."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from msgspec import Struct


class Action(StrEnum):
    """The reaction to a degenerate answer.

    ``retry``: one retry with another seed, if the caller has no text yet and the request samples, else
    ``end``. ``end``: the answer ends with the text so far and finish reason ``error``. ``abort``: it fails.
    """

    RETRY = "retry"
    END = "end"
    ABORT = "abort"
    OFF = "off"


REPLACEMENT = "\ufffd"
CHARS_PER_TOKEN = 4  # typical for English and code; converts limits to characters when ids are not reported

S = TypeVar("S", str, tuple[int, ...])


class Sign(StrEnum):
    """The symptom of a degenerate text."""

    REPETITION = "repetition"
    REPLACEMENT = "replacement"


@dataclass(frozen=True, slots=True)
class DegenerateLimits:
    """The limits above which a text is degenerate.

    Defaults are twice the longest runs that ``python -m benchmarks.repetition`` finds in ordinary text and
    code with a tokenizer of short tokens: 78 of one token in a ruled line, 246 of a cycle in a table's rule.

    Args:
        repeat_tokens: length of a run of the same token, in tokens.
        cycle_tokens: length of a run of one repeated cycle, in tokens.
        cycle_length: length of the longest cycle, in tokens.
        replacement_chars: replacement characters in ``replacement_window`` characters; 0: not counted.
    """

    repeat_tokens: int = 160
    cycle_tokens: int = 512
    cycle_length: int = 8
    replacement_chars: int = 8
    replacement_window: int = 32

    def __post_init__(self) -> None:
        if self.cycle_tokens < 2 * self.cycle_length:
            raise ValueError(
                f"cycle_tokens is {self.cycle_tokens}; allowed: two cycles ({2 * self.cycle_length}) or more"
            )
        if self.replacement_chars > self.replacement_window:
            raise ValueError(
                f"replacement_chars is {self.replacement_chars}; "
                f"allowed: 0 to replacement_window ({self.replacement_window})"
            )


class Detector:
    """Reads one text piece by piece and detects that it is degenerate.

    Repetition is detected by token ids while every piece has them, else by the text, with
    ``CHARS_PER_TOKEN`` and one limit for runs and cycles. A repetition that has ended is ignored.
    """

    __slots__ = ("_by_ids", "_chars", "_ids", "_limits", "_replaced", "_text")

    def __init__(self, limits: DegenerateLimits) -> None:
        self._limits = limits
        self._by_ids = True
        # Each is made when a piece needs it.
        self._ids: _Repetition[tuple[int, ...]] | None = None
        self._text: _Repetition[str] | None = None
        self._chars = 0
        self._replaced: deque[int] | None = None  # the last positions

    def take(self, text: str, tokens: int, token_ids: tuple[int, ...]) -> Sign | None:
        """Take the next piece, its number of tokens, and their ids if reported; returns the sign, if any."""
        garbled = REPLACEMENT in text and self._replaced_too_often(text)
        self._chars += len(text)
        if garbled:
            return Sign.REPLACEMENT
        if tokens and len(token_ids) != tokens:
            self._by_ids = False
        if self._by_ids:
            if self._ids is None:
                limits, length = self._limits, self._limits.cycle_length
                overs = (limits.repeat_tokens, *[limits.cycle_tokens] * (length - 1))
                self._ids = _Repetition((), overs, [0] * length)
            repeats = self._ids.take(token_ids)
        else:
            if self._text is None:
                over, chars = self._limits.cycle_tokens, self._limits.cycle_length * CHARS_PER_TOKEN
                self._text = _Repetition("", (over * CHARS_PER_TOKEN,) * chars, [0] * chars)
            repeats = self._text.take(text)
        return Sign.REPETITION if repeats else None

    def _replaced_too_often(self, text: str) -> bool:
        most = self._limits.replacement_chars
        places = self._replaced = self._replaced or deque(maxlen=most)
        for at, char in enumerate(text, self._chars):
            if char == REPLACEMENT:
                places.append(at)
                if len(places) == most > 0 and at - places[0] < self._limits.replacement_window:
                    return True
        return False


class _Repetition(Struct, Generic[S], eq=False):
    """Detects that a sequence ends in many repetitions of one short cycle.

    ``_end`` is the last of the sequence, as long as the longest cycle. By the cycle's length, from 1:
    ``_runs`` are the items of the current run, degenerate from ``_overs`` on.
    """

    _end: S
    _overs: tuple[int, ...]
    _runs: list[int]

    def take(self, piece: S) -> bool:
        """Take the next piece; returns whether the end repeats itself."""
        if not piece:
            return False
        seen, new, runs = self._end + piece, len(piece), self._runs
        cycle = len(runs)
        self._end = seen[-cycle:]
        # In every repetition the end occurs once more, at most one cycle before.
        if isinstance(seen, tuple):
            found = seen[-1] in seen[-1 - cycle : -1]
        else:
            end = max(1, min(cycle, len(seen) - cycle))
            found = seen[-end:] in seen[-end - cycle : -1]
        if not found:
            self._runs = [0] * cycle
            return False
        found = False
        for at, over in enumerate(self._overs):
            before = at + 1
            if len(seen) > before and seen[-1] == seen[-1 - before]:
                start = max(len(seen) - new, before)
                if seen[start:] == seen[start - before : -before]:
                    runs[at] += len(seen) - start
                    found = found or runs[at] + before >= over
                    continue
            runs[at] = 0
        return found
