"""Going on with a broken answer on a backend: in which way, from where, and how the rest is joined.

Three ways, the best first. ``exact``: the prompt's ids and those of the answer. ``spelled``: the same, with
ids that spell the answer's text, when the backends did not tell theirs or another model chose them. ``text``:
an assistant message that the backend completes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from gateway.backends.port import Backend, Continue, Delta, PartialAnswer
from gateway.contracts.values import FormatType
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.job import Job
from resilience.failures import BackendFailure, FailureKind
from resilience.resume import Mismatch, ResumePoint, Splice, align


class Mode(StrEnum):
    """How an answer is gone on with."""

    EXACT = "exact"
    SPELLED = "spelled"
    TEXT = "text"


class Spelling(Protocol):
    """What tokens are to the models that take token ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; nothing for a control token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a text."""


def mode_on(backend: Backend, job: Job, stream: AnswerStream) -> Mode | None:
    """How ``backend`` could go on with the answer; ``None`` when it cannot.

    Cheap: whether the ids really fit the text shows in :func:`continuation`.
    """
    request, ways, origin = job.request, backend.continues, stream.origin
    if origin is None or request.sampling.n != 1 or job.must_honour - backend.features:
        return None
    if request.response_format.type is not FormatType.TEXT and Continue.SHAPED not in ways:
        return None
    if Continue.TOKENS in ways:
        known = stream.token_ids is not None and backend.model == origin.model
        return Mode.EXACT if known else Mode.SPELLED
    return Mode.TEXT if Continue.TEXT in ways and origin.plan.messages else None


def goes_on_exactly(backend: Backend, job: Job) -> bool:
    """Whether an answer that ``backend`` has not begun yet could be gone on with on it, if it breaks off."""
    shaped = job.request.response_format.type is not FormatType.TEXT
    return (
        Continue.TOKENS in backend.continues
        and job.request.sampling.n == 1
        and (not shaped or Continue.SHAPED in backend.continues)
    )


@dataclass(frozen=True, slots=True)
class Continuation:
    """One way to go on, ready to be asked for.

    ``token_ids`` are those of the answer that stay, ``None`` when they are not known.
    """

    mode: Mode
    begun: PartialAnswer
    token_ids: tuple[int, ...] | None
    joint: Splice


def continuation(backend: Backend, job: Job, stream: AnswerStream, spelling: Spelling) -> Continuation | None:
    """The best way in which ``backend`` can go on with what ``stream`` has seen; ``None`` without one."""
    mode, text = mode_on(backend, job, stream), stream.text()
    if mode is Mode.EXACT:
        seam = align(stream.token_ids or (), text, spelling.token_bytes)
        if seam is not None:
            joint = Splice(seam, job.request.sampling.stop, spelling.token_bytes)
            return Continuation(mode, PartialAnswer(seam.behind(text), seam.token_ids), seam.token_ids, joint)
        mode = Mode.SPELLED
    if mode is Mode.SPELLED:
        ids = spelling.encode(text, add_special_tokens=False)
        if _spells(ids, text, spelling):
            return Continuation(mode, PartialAnswer(text, ids), None, Splice(ResumePoint(ids)))
        ways = backend.continues
        origin = stream.origin
        able = Continue.TEXT in ways and origin is not None and bool(origin.plan.messages)
        mode = Mode.TEXT if able else None
    if mode is Mode.TEXT and text:
        return Continuation(mode, PartialAnswer(text), None, Splice(ResumePoint(())))
    return None


def _spells(ids: Sequence[int], text: str, spelling: Spelling) -> bool:
    return b"".join(map(spelling.token_bytes, ids)) == text.encode()


class SplicedStream:
    """Takes the pieces of a continuation and passes on what the caller has not got."""

    __slots__ = ("_joint", "_stream")

    def __init__(self, stream: AnswerStream, joint: Splice) -> None:
        self._stream = stream
        self._joint = joint

    async def take(self, delta: Delta) -> None:
        """Pass one piece on.

        Raises:
            BackendFailure: ``stream_broken``: it does not fit what the caller has.
        """
        if not self._joint.joined:
            try:
                delta = replace(delta, text=self._joint.take(delta.text, delta.token_ids))
            except Mismatch:
                raise _mismatch() from None
        await self._stream.take(delta)

    async def end(self) -> None:
        """Give what is still held; raises as :meth:`take`."""
        try:
            held = self._joint.end()
        except Mismatch:
            raise _mismatch() from None
        if held:
            await self._stream.take(Delta(held, 0))


def _mismatch() -> BackendFailure:
    return BackendFailure(
        FailureKind.STREAM_BROKEN, "what was generated again is not what had been delivered"
    )
