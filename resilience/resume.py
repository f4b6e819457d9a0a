"""Decides how a broken answer is resumed: mode, first new token, and joining of the rest; sans-I/O.

An engine holds text back: incomplete characters, and words that may start a stop string. So the reported ids
may be ahead of the text; resuming after all of them would leave out text.
"""

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
        wait_s: if a restart is expected within this time, requests wait for it before the next leg.
        max_wait_s: longest wait for all restarts together.
        commit_chunks: pieces of a stream held back while its answer could not be resumed exactly; 0: none.
        commit_s: longest time that these pieces are held back.
    """

    enabled: bool
    wait_s: float
    max_wait_s: float
    commit_chunks: int
    commit_s: float


class ResumeMode(StrEnum):
    """The form in which a backend gets the partial answer. The best mode comes first."""

    EXACT = "exact"  # the prompt's ids and the answer's own
    SPELLED = "spelled"  # ids that spell the answer's text
    TEXT = "text"  # an assistant message that the backend completes


def resume_modes(*, takes_ids: bool, ids_known: bool, takes_text: bool) -> tuple[ResumeMode, ...]:
    """The possible modes, best first.

    Args:
        takes_ids: the backend resumes from token ids.
        ids_known: every id of the answer is known, and the same model generated them.
        takes_text: the backend completes a message, and the prompt has messages.
    """
    possible = (takes_ids and ids_known, takes_ids, takes_text)
    return tuple([mode for mode, is_possible in zip(ResumeMode, possible, strict=True) if is_possible])


class Spelling(Protocol):
    """The tokenizer of the models that take token ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; for a control token its markup."""

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to an answer's text; none for a control token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a text."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The point at which an answer is resumed.

    Args:
        token_ids: the ids that are kept; the next token is generated after them.
        held: text of the last kept id that the caller does not have; it is sent first.
        repeated: the end of the caller's text that the ids do not cover; the new output repeats it, and it is
            not sent again. One of ``held`` and ``repeated`` is empty.
    """

    token_ids: tuple[int, ...]
    held: str = ""
    repeated: str = ""

    def covered(self, text: str) -> str:
        """The text of ``token_ids``, if the caller has ``text``."""
        return text[: len(text) - len(self.repeated)] + self.held


def align(token_ids: Sequence[int], text: str, token_bytes: Callable[[int], bytes]) -> ResumePoint | None:
    """The point after the caller's ``text``: the fewest of the reported ids that cover it.

    When the last of these ids covers more than the text, the rest is ``held``. When they end inside a
    character, ids are dropped back to the end of a character, and the text after it is ``repeated``.
    ``None`` when ids and text belong to different answers.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    got, kept, rest = 0, 0, ""
    ends, covered = 0, 0  # ids and characters up to the last end of a character
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
    # The ids end inside a character or before the text's end: an earlier resumption did not repeat all of it.
    return ResumePoint(tuple(token_ids[:ends]), repeated=text[covered:])


def tokens_of_text(token_ids: Sequence[int], text: str, token_bytes: Callable[[int], bytes]) -> int:
    """How many of the reported ids cover the caller's ``text``; all of them if that cannot be known."""
    point = align(token_ids, text, token_bytes)
    return len(token_ids) if point is None or point.repeated else len(point.token_ids)


def without_open_character(token_ids: tuple[int, ...], text_bytes: Callable[[int], bytes]) -> tuple[int, ...]:
    """The ids before those that at the end spell only a part of a character."""
    while b"".join(map(text_bytes, token_ids[-8:])).decode(errors="replace").endswith("\ufffd"):
        token_ids = token_ids[:-1]
    return token_ids


class Mismatch(Exception):
    """The text that was generated again differs from the caller's text."""


class Splice:
    """Joins the output of a resumed call to the caller's text.

    No answer contains one of the stop strings, whichever of the calls generated its start.
    """

    def __init__(
        self,
        point: ResumePoint,
        stop: Sequence[str] = (),
        token_bytes: Callable[[int], bytes] = lambda _: b"",
    ) -> None:
        self._held = point.held
        self._repeated = point.repeated
        self._stop = tuple(stop)
        self._token_bytes = token_bytes
        self._new = bytearray()  # bytes of new tokens whose text the engine held back

    @property
    def joined(self) -> bool:
        """Whether further output is passed on unchanged."""
        return not self._held and not self._repeated

    def take(self, text: str, token_ids: Sequence[int] = ()) -> str:
        """The part of a piece that the caller lacks. Raises Mismatch if it does not repeat the text."""
        if self._repeated:
            length = min(len(text), len(self._repeated))
            if text[:length] != self._repeated[:length]:
                raise Mismatch
            self._repeated, text = self._repeated[length:], text[length:]
        if self._held and text:
            text, self._held = self._held + text, ""
        elif self._held and self._stop:
            for token_id in token_ids:
                self._new += self._token_bytes(token_id)
        return text

    def end(self) -> str:
        """The text still held at the end of the call, up to a stop string whose rest the engine held back.

        Raises Mismatch when the call ended before it repeated the text.
        """
        if self._repeated:
            raise Mismatch
        held, self._held = self._held, ""
        whole = held + self._new.decode(errors="replace")
        ends = [at for stop in self._stop if 0 <= (at := whole.find(stop)) < len(held)]
        return held[: min(ends)] if ends else held


@dataclass(frozen=True, slots=True)
class Resumption:
    """One way to resume an answer.

    Args:
        text: the part of the answer that the backend gets.
        token_ids: ids that decode to ``text``; ``None`` if the backend gets only the text.
        splice: joins the new output to the caller's text.
        tokens: the tokens of the earlier calls that are kept; the others are generated again.
    """

    mode: ResumeMode
    text: str
    token_ids: tuple[int, ...] | None
    splice: Splice
    tokens: int


def plan_resumption(
    modes: Sequence[ResumeMode],
    text: str,
    token_ids: Sequence[int],
    stop: Sequence[str],
    spelling: Spelling,
    *,
    tokens: int,
    repeats: bool = True,
) -> Resumption | None:
    """The first of ``modes`` that fits the caller's ``text`` and its ids; ``None`` when none does.

    Args:
        tokens: the earlier calls' tokens whose text the caller has.
        repeats: the backend generates the same tokens again; otherwise a point that needs this is not used.
    """
    for mode in modes:
        if mode is ResumeMode.EXACT:
            # A text has the markup of its control tokens only with vLLM's skip_special_tokens: false.
            for bytes_of in (spelling.text_bytes, spelling.token_bytes):
                point = align(token_ids, text, bytes_of)
                if point is not None and (repeats or not point.repeated):
                    splice = Splice(point, stop, bytes_of)
                    ids = point.token_ids
                    return Resumption(mode, point.covered(text), ids, splice, len(ids))
        elif mode is ResumeMode.SPELLED:
            ids = spelling.encode(text, add_special_tokens=False)
            if b"".join(map(spelling.token_bytes, ids)) == text.encode():
                return Resumption(mode, text, ids, Splice(ResumePoint(ids)), tokens)
        elif text:
            return Resumption(mode, text, None, Splice(ResumePoint(())), tokens)
    return None
