"""Finds content in system texts that changes from request to request, and removes it from them.

A prefix cache reuses a prompt up to its first changed token. Found are dates and times, Unix timestamps,
UUIDs, ULIDs, long hex ids, ids of requests, sessions and traces, and counters of turns. Similar fixed content
stays: years in prose, prices, ISBNs, version numbers, opening hours, dates since which something applies, and
fenced blocks of code.

The whole sentence with a finding is removed, even if it continues after a line end, so that its meaning is
kept. Every pattern has a bounded length, so the time is linear in the text's length.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gateway.prompts.patterns import (
    ABBREVIATION,
    ABBREVIATION_CHARS,
    CONTINUES_LINE,
    CUE_CHARS,
    CURRENT_TURN,
    CUT,
    ENDS,
    FENCE,
    FIXED,
    MAY_BE_VOLATILE,
    NOW,
    PATTERN,
    UNFINISHED,
    UNIX,
)

# Limits of the cache of lines: about 4 MiB.
REMEMBERED_LINES: Final = 4_096
REMEMBERED_CHARS: Final = 1_024
# A longer text without the end of a sentence is data, not prose, and is not searched; so one search takes at
# most some milliseconds.
MAX_SENTENCE_CHARS: Final = 4_096
MAX_LINE_CHARS: Final = 65_536
"""A longer line is data too. No other thread runs while one pattern searches one text: 0.9 s for 4 MB."""


class VolatileKind(StrEnum):
    """The kind of a finding; a closed set, so that it can be a metric's label."""

    DATE = "date"
    TIME = "time"
    TIMESTAMP = "timestamp"
    UUID = "uuid"
    ULID = "ulid"
    ID = "id"
    HEX = "hex"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class VolatileFinding:
    """One piece of volatile content (``text``, never logged), the sentence that contains it, and the number
    of the caller's system message, from 0."""

    kind: VolatileKind
    text: str
    sentence: str
    message: int = 0


@dataclass(frozen=True, slots=True)
class Separated:
    """A system text in two parts: the rest, and the removed sentences, verbatim and in order."""

    stable: str
    moved: tuple[str, ...] = ()
    findings: tuple[VolatileFinding, ...] = ()


_KINDS: Final = {
    "uuid": VolatileKind.UUID,
    "stamp": VolatileKind.TIME,
    "date": VolatileKind.DATE,
    "cjk": VolatileKind.DATE,
    "day": VolatileKind.DATE,
    "time": VolatileKind.TIME,
    "clock": VolatileKind.TIME,
    "label": VolatileKind.ID,
    "tagged": VolatileKind.ID,
    "ulid": VolatileKind.ULID,
    "hex": VolatileKind.HEX,
    "unix": VolatileKind.TIMESTAMP,
    "counter": VolatileKind.COUNTER,
    "turn": VolatileKind.COUNTER,
}
# Words before a match without which it is not volatile.
_CUES: Final = {"day": NOW, "clock": NOW, "unix": UNIX, "turn": CURRENT_TURN}


@dataclass(frozen=True, slots=True)
class _Line:
    """One line: its sentences, which joined are the line, and the findings in each."""

    pieces: tuple[str, ...]
    found: tuple[tuple[tuple[VolatileKind, str], ...], ...]
    hit: bool = False


class VolatileFinder:
    """Separates system texts; caches lines, because most of a system text is equal in each request.
    Thread-safe."""

    def __init__(self, *, max_lines: int = REMEMBERED_LINES) -> None:
        self._max_lines = max_lines
        self._lines: dict[str, _Line] = {}
        self._lock = threading.Lock()

    def separate(self, text: str, message: int = 0) -> Separated:
        """Remove the sentences with volatile content; each finding has the number ``message``.

        Deterministic and idempotent. All text except white space is in ``stable`` or in ``moved``, in order.
        """
        if len(text) <= MAX_LINE_CHARS and not MAY_BE_VOLATILE.search(text):
            return Separated(text)
        lines: list[_Line] = []
        has_fences = "```" in text or "~~~" in text
        fenced = False
        for line in text.split("\n"):
            is_fence = has_fences and FENCE.match(line) is not None
            data = fenced or is_fence or len(line) > MAX_LINE_CHARS
            plain = _Line((line,), ((),)) if data else self._lines.get(line)
            lines.append(plain or self._search(line))
            fenced ^= is_fence
        if not any(line.hit for line in lines):
            return Separated(text)
        findings = tuple(
            VolatileFinding(kind, what, piece.strip(), message)
            for line in lines
            for piece, found in zip(line.pieces, line.found, strict=True)
            for kind, what in found
        )
        return _parted(lines, findings)

    def _search(self, line: str) -> _Line:
        pieces = _sentences(line)
        found = tuple([tuple(_volatile_in(piece)) for piece in pieces])
        looked_at = _Line(pieces, found, any(found))
        # A line with a finding is not likely to recur, so it is not cached.
        if len(line) <= REMEMBERED_CHARS and not looked_at.hit:
            with self._lock:
                if len(self._lines) >= self._max_lines:
                    del self._lines[next(iter(self._lines))]
                self._lines[line] = looked_at
        return looked_at


def _sentences(line: str) -> tuple[str, ...]:
    """Split the line after each sentence; the joined parts are the line again."""
    cut, at = [], 0
    for end in ENDS.finditer(line):
        shown = line[max(0, end.start() - ABBREVIATION_CHARS) : end.start() + 1]
        if line[end.start()] == "." and ABBREVIATION.search(shown):
            continue
        cut.append(line[at : end.end()])
        at = end.end()
    if at < len(line) or not cut:
        cut.append(line[at:])
    return tuple(cut)


def _volatile_in(piece: str) -> Iterator[tuple[VolatileKind, str]]:
    sentence = piece.strip()
    if len(sentence) > MAX_SENTENCE_CHARS or not MAY_BE_VOLATILE.search(sentence):
        return
    for match in PATTERN.finditer(sentence):
        group, start = match.lastgroup or "", match.start()
        before = sentence[:start] if start <= CUE_CHARS else CUT + sentence[start - CUE_CHARS : start]
        if _means_now(group, match[0], before):
            yield _KINDS[group], match[0]


def _means_now(group: str, what: str, before: str) -> bool:
    """Whether a match is volatile, by the words before it."""
    if group in ("date", "cjk"):
        return not FIXED.search(before) or NOW.search(before) is not None
    if group in ("stamp", "time"):
        return not FIXED.search(before)
    if (cue := _CUES.get(group)) is not None:
        return cue.search(before) is not None
    if group == "ulid":
        return what.upper() == what
    return True


def _parted(lines: list[_Line], findings: tuple[VolatileFinding, ...]) -> Separated:
    """Separate the lines into the rest and the removed sentences.

    The sentences before and after a removed one get separate lines, so that they are not joined and another
    search finds nothing new.
    """
    hits = [[bool(found) for found in line.found] for line in lines]
    _extend_hits(lines, hits)
    stable: list[str] = []
    moved: list[str] = []
    gap = False
    for line, hit in zip(lines, hits, strict=True):
        if not any(hit):
            # A removed paragraph leaves one blank line, not two.
            if line.pieces[0] or not (gap and stable and not stable[-1]):
                stable.append("".join(line.pieces))
                gap = False
            continue
        parts: list[str] = []
        after_a_gap = True
        for piece, gone in zip(line.pieces, hit, strict=True):
            if gone:
                moved.append(piece.strip())
            elif after_a_gap:
                parts.append(piece)
            else:
                parts[-1] += piece
            after_a_gap = gone
        stable += [part.rstrip() for part in parts if part.strip()]
        gap = not any(part.strip() for part in parts)
    return Separated("\n".join(stable).strip(), tuple(moved), findings)


def _extend_hits(lines: list[_Line], hits: list[list[bool]]) -> None:
    """Extend each hit to the whole sentence if it continues over a line end."""
    last = len(lines) - 1
    for at in range(last):
        if hits[at][-1] and _runs_on(lines[at], lines[at + 1]):
            hits[at + 1][0] = True
    for at in range(last, 0, -1):
        if hits[at][0] and _runs_on(lines[at - 1], lines[at]):
            hits[at - 1][-1] = True


def _runs_on(line: _Line, following: _Line) -> bool:
    """Whether ``following`` continues the last sentence of ``line``."""
    end = line.pieces[-1][-1:]
    unfinished = end.isalnum() or (end != "" and end in UNFINISHED)
    return unfinished and CONTINUES_LINE.match(following.pieces[0]) is not None
