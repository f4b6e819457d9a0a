"""Resuming a broken answer: in which mode, from which token, and how the rest is joined to the first part.

An engine holds text back: bytes that are not a whole character yet, words that may start a stop string. So
the reported ids may be ahead of the text, and a resumption from all of them would leave a hole, one from too
few would repeat text. Sans I/O.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ResumeRules:
    """A route's rules for broken answers.

    Args:
        enabled: whether answers are resumed, and requests wait for a restart.
        wait_s: a restart that is expected within this is waited for before the next leg is asked.
        max_wait_s: longest wait for restarts, all together.
        commit_chunks: pieces of a stream held back while its answer could not be resumed exactly; 0: none.
        commit_s: longest that they are held.
    """

    enabled: bool
    wait_s: float
    max_wait_s: float
    commit_chunks: int
    commit_s: float


class ResumeMode(StrEnum):
    """What a backend is given of the answer. The best mode comes first."""

    EXACT = "exact"  # the prompt's ids and the answer's own
    SPELLED = "spelled"  # ids that spell the answer's text
    TEXT = "text"  # an assistant message that the backend completes


def resume_modes(*, takes_ids: bool, ids_known: bool, takes_text: bool) -> tuple[ResumeMode, ...]:
    """The modes that are possible, best first.

    Args:
        takes_ids: whether the backend resumes from token ids.
        ids_known: whether every id of the answer is known, chosen by the same model.
        takes_text: whether the backend completes a message, and the prompt has messages.
    """
    possible = (takes_ids and ids_known, takes_ids, takes_text)
    return tuple([mode for mode, is_possible in zip(ResumeMode, possible, strict=True) if is_possible])


class Spelling(Protocol):
    """What tokens are to the models that take token ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for a control token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a text."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where an answer is resumed.

    Args:
        token_ids: the ids that stay; the next token is generated after them.
        held: text of the last of them that the caller does not have; it is sent first.
        again: the end of the caller's text that these ids do not cover; the new output starts with it, and it
            is not sent again. One of ``held`` and ``again`` is empty.
    """

    token_ids: tuple[int, ...]
    held: str = ""
    again: str = ""

    def covered(self, text: str) -> str:
        """What the ids decode to, where ``text`` is what the caller has."""
        return text[: len(text) - len(self.again)] + self.held


def align(token_ids: Sequence[int], text: str, token_bytes: Callable[[int], bytes]) -> ResumePoint | None:
    """The point after ``text``: the shortest run of the ids that covers it.

    When the last of them covers more than the text, the rest is ``held``. When that would end inside a
    character, ids are dropped back to where a character ends, and the text after that is generated ``again``.

    Args:
        token_ids: those reported with the text, perhaps more.
        text: what the caller has.
        token_bytes: the bytes of a token; none for a control token.

    Returns:
        ``None`` when ids and text belong to different answers.
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
    # Inside a character, or short of the text: an earlier resumption did not repeat its part to the end.
    return ResumePoint(tuple(token_ids[:ends]), again=text[covered:])


class Mismatch(Exception):
    """The text that was generated again differs from what the caller has."""


class Splice:
    """Joins the output of a resumed call to what the caller has.

    Args:
        point: where the answer is resumed.
        stop: the request's stop strings; no answer contains one, whichever call wrote its start.
        token_bytes: as for :func:`align`.
    """

    __slots__ = ("_again", "_held", "_new", "_stop", "_token_bytes")

    def __init__(
        self,
        point: ResumePoint,
        stop: Sequence[str] = (),
        token_bytes: Callable[[int], bytes] = lambda _: b"",
    ) -> None:
        self._held = point.held
        self._again = point.again
        self._stop = tuple(stop)
        self._token_bytes = token_bytes
        self._new = bytearray()  # of pieces that the engine held back

    @property
    def joined(self) -> bool:
        """Whether further output is passed on unchanged."""
        return not self._held and not self._again

    def take(self, text: str, token_ids: Sequence[int] = ()) -> str:
        """The part of a piece that the caller does not have, after what was held.

        Raises:
            Mismatch: it does not start with the text that should be repeated.
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
        """What is still held when the call has ended without further text.

        Where a stop string starts in it whose rest was generated but held back, the text ends before that.

        Raises:
            Mismatch: the call ended before it repeated that text.
        """
        if self._again:
            raise Mismatch
        held, self._held = self._held, ""
        whole = held + self._new.decode(errors="replace")
        ends = [at for stop in self._stop if 0 <= (at := whole.find(stop)) < len(held)]
        return held[: min(ends)] if ends else held


@dataclass(frozen=True, slots=True)
class Resumption:
    """One way to resume an answer.

    Args:
        mode: the way.
        text: the part of the answer that the backend is given.
        token_ids: ids that decode to ``text``; ``None`` where the backend is given the text alone.
        splice: joins the new output to what the caller has.
    """

    mode: ResumeMode
    text: str
    token_ids: tuple[int, ...] | None
    splice: Splice


def plan_resumption(
    modes: Sequence[ResumeMode],
    text: str,
    token_ids: Sequence[int],
    stop: Sequence[str],
    spelling: Spelling,
) -> Resumption | None:
    """The first of ``modes`` that fits the answer; ``None`` when none does.

    Args:
        modes: the possible ones, best first.
        text: what the caller has, or would have been given.
        token_ids: those that were reported with it.
        spelling: what token ids are text of.
    """
    for mode in modes:
        if mode is ResumeMode.EXACT:
            point = align(token_ids, text, spelling.token_bytes)
            if point is not None:
                splice = Splice(point, stop, spelling.token_bytes)
                return Resumption(mode, point.covered(text), point.token_ids, splice)
        elif mode is ResumeMode.SPELLED:
            ids = spelling.encode(text, add_special_tokens=False)
            if b"".join(map(spelling.token_bytes, ids)) == text.encode():
                return Resumption(mode, text, ids, Splice(ResumePoint(ids)))
        elif text:
            return Resumption(mode, text, None, Splice(ResumePoint(())))
    return None
