"""Where a broken answer is taken up again: which tokens the caller has, and how the rest is joined to them.

An engine holds text back: bytes that are no whole character yet, words that may be the start of a stop
string. So the ids that it told may be ahead of the text that it gave, and a continuation from all of them
would leave a hole, one from too few would say something twice. Sans I/O.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where an answer goes on.

    Args:
        token_ids: the ids that stay; the next token is generated behind them.
        held: text of the last of them that the caller has not got; it is given first.
        again: the end of the caller's text that these ids do not cover; what is generated starts with it, and
            it is not given again. One of ``held`` and ``again`` is empty.
    """

    token_ids: tuple[int, ...]
    held: str = ""
    again: str = ""

    def behind(self, text: str) -> str:
        """What the ids decode to, where ``text`` is what the caller has."""
        return text[: len(text) - len(self.again)] + self.held


def align(token_ids: Sequence[int], text: str, token_bytes: Callable[[int], bytes]) -> ResumePoint | None:
    """The seam behind ``text``: the shortest run of the ids that covers it.

    When the last of them stands for more than its part of the text, the rest is ``held``. When that would end
    inside a character, ids are dropped back to where a character ends, and the text behind is generated
    ``again``.

    Args:
        token_ids: those told with the text, perhaps more.
        text: what the caller has.
        token_bytes: what an id stands for; nothing for a control token.

    Returns:
        ``None`` when ids and text tell of different answers.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    got, kept, rest = 0, 0, ""
    ends, covered = 0, 0  # ids and characters up to where a character last ended
    while got < len(text) and kept < len(token_ids):
        piece = decoder.decode(token_bytes(token_ids[kept]))
        mine, rest = piece[: len(text) - got], piece[len(text) - got :]
        if not text.startswith(mine, got):
            return None
        kept, got = kept + 1, got + len(piece)
        if not decoder.getstate()[0]:
            ends, covered = kept, got
    if ends == kept and covered >= len(text):
        return ResumePoint(tuple(token_ids[:kept]), held=rest)
    # Inside a character, or short of the text because a seam before this one was not given again to its end.
    return ResumePoint(tuple(token_ids[:ends]), again=text[covered:])


class Mismatch(Exception):
    """What was generated again is not what the caller has."""


class Splice:
    """Joins what a continuation gives to what the caller has.

    Args:
        seam: where it goes on.
        stop: the request's stop strings; they never stand in an answer, whichever call wrote their start.
        token_bytes: as for :func:`align`.
    """

    __slots__ = ("_again", "_held", "_new", "_stop", "_token_bytes")

    def __init__(
        self,
        seam: ResumePoint,
        stop: Sequence[str] = (),
        token_bytes: Callable[[int], bytes] = lambda _: b"",
    ) -> None:
        self._held = seam.held
        self._again = seam.again
        self._stop = tuple(stop)
        self._token_bytes = token_bytes
        self._new = bytearray()  # of a piece that was only held back

    @property
    def joined(self) -> bool:
        """Whether what comes now is given as it is."""
        return not self._held and not self._again

    def take(self, text: str, token_ids: Sequence[int] = ()) -> str:
        """The part of a piece that the caller has not got yet, with what was held before it.

        Raises:
            Mismatch: it does not start with what should come again.
        """
        if self._again:
            length = min(len(text), len(self._again))
            if text[:length] != self._again[:length]:
                raise Mismatch
            self._again, text = self._again[length:], text[length:]
        if self._held and text:
            text, self._held = self._held + text, ""
        elif self._held and self._stop:
            for token_id in token_ids:
                self._new += self._token_bytes(token_id)
        return text

    def end(self) -> str:
        """What is still held when the continuation has ended without further text.

        Where a stop string began in it, the rest of which came without being given, it ends before that.

        Raises:
            Mismatch: the continuation ended before what should come again.
        """
        if self._again:
            raise Mismatch
        held, self._held = self._held, ""
        whole = held + self._new.decode(errors="replace")
        ends = [at for stop in self._stop if 0 <= (at := whole.find(stop)) < len(held)]
        return held[: min(ends)] if ends else held
