"""A backend that plays a script: the fake of the port."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from msgspec import structs

from admission.values import BackendLoad
from budgeting.values import Message, Plan, Role, SectionCounts
from gateway.backends.partial_answer import check_partial
from gateway.backends.port import BackendState, Completion, Continue, DeltaSink, Work
from gateway.contracts.answer import Answer
from gateway.contracts.events import Delta
from gateway.contracts.features import Feature
from gateway.contracts.values import (
    Caller,
    CallerRole,
    Contract,
    FinishReason,
    GenerateRequest,
    TokenLogprob,
    Usage,
)
from gateway.errors import PublicError
from gateway.generation.answer_stream import AnswerOrigin, AnswerStream
from gateway.generation.sink import Sink
from resilience.failures import BackendFailure, invalid_input

EVEN = math.log(0.5)


@dataclass(frozen=True, slots=True)
class Script:
    """What one call does: the pieces of each text, the seconds before each piece, and how the call ends.

    A piece is one token with probability one half. ``token_ids`` are those of the pieces, if there are any.
    With ``cached_at_end`` the cached tokens are reported at the end only, as by workers.
    With a ``failure`` the call breaks off after ``breaks_after`` pieces of its own, at the end when ``None``.
    A call that resumes an answer plays the pieces after the partial answer.

    ``events`` are played unchanged instead of the pieces, for any number of choices; ``token_ids`` and
    ``breaks_after`` then refer to events, and ``finish_reasons`` are those of the choices.
    """

    pieces: tuple[str, ...] = ("Hello", " there", ".")
    delay_s: float = 0.0
    failure: BackendFailure | None = None
    finish_reason: FinishReason = FinishReason.STOP
    cached_tokens: int = 0
    cached_at_end: bool = False
    token_ids: tuple[int, ...] = ()
    breaks_after: int | None = None
    events: tuple[Delta, ...] = ()
    finish_reasons: tuple[FinishReason, ...] = ()

    def rest_after(self, work: Work) -> tuple[int, int]:
        """The number of pieces to skip, and of characters of the next piece.

        Raises BackendFailure: ``invalid_input``: the partial answer is not from this script.
        """
        if work.partial is None:
            return 0, 0
        text = work.partial.text
        if not "".join(self.pieces).startswith(text):
            raise invalid_input("the partial answer is not this one")
        known = work.partial.token_ids
        if known is not None and self.token_ids:
            if self.token_ids[: len(known)] != known:
                raise invalid_input("the partial tokens are not this answer's")
            return len(known), len(text) - len("".join(self.pieces[: len(known)]))
        skipped = 0
        for number, piece in enumerate(self.pieces):
            if skipped + len(piece) > len(text):
                return number, len(text) - skipped
            skipped += len(piece)
        return len(self.pieces), 0


@dataclass(eq=False)
class ScriptedBackend:
    """Plays scripts, one per call; the last one is repeated. Obeys every invariant of the port."""

    kind: ClassVar = "embedded"

    name: str = "local"
    _: KW_ONLY
    scripts: Sequence[Script] = (Script(),)
    model: str = "scripted"
    features: frozenset[Feature] = frozenset(Feature)
    state: BackendState = BackendState.READY
    load: BackendLoad | None = None
    continues: frozenset[Continue] = frozenset()
    calls: list[Work] = field(default_factory=list)
    active: int = 0

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        script, *rest = self.scripts
        self.scripts = rest or [script]
        self.calls.append(work)
        check_partial(work, self.continues, self.name)
        self.active += 1
        try:
            if script.events:
                return await _play(script, work, out)
            n, reported = work.sampling.n, work.sampling.logprobs is not None
            first, skipped = script.rest_after(work)
            ends = len(script.pieces) if script.breaks_after is None else first + script.breaks_after
            for number, piece in enumerate(script.pieces[first:ends], first):
                await asyncio.sleep(script.delay_s)
                text = piece[max(0, skipped) :]
                skipped = max(0, skipped - len(piece))
                cached_tokens, wait_s = (script.cached_tokens, 0.0) if number == first else (None, None)
                cached_tokens = None if script.cached_at_end else cached_tokens
                logprobs = (TokenLogprob(piece.encode(), EVEN),) if reported else ()
                ids = script.token_ids[number : number + 1]
                for index in range(n):
                    await out(Delta(text, 1, cached_tokens, wait_s, index, logprobs, ids))
            if script.failure is not None:
                raise script.failure
            usage = Usage(len(work.token_ids), n * (len(script.pieces) - first), script.cached_tokens)
            return Completion(script.finish_reason, usage, others=(script.finish_reason,) * (n - 1))
        finally:
            self.active -= 1


async def _play(script: Script, work: Work, out: DeltaSink) -> Completion:
    """Play the script's events; those of a partial answer are played again, without tokens."""
    known = len(work.partial_ids)
    ends = len(script.events) if script.breaks_after is None else known + script.breaks_after
    tokens = 0
    for number, event in enumerate(script.events[:ends]):
        await asyncio.sleep(script.delay_s)
        ids = script.token_ids[number : number + 1]
        if number < known:
            event = structs.replace(event, tokens=0)
        elif ids:
            event = structs.replace(event, tokens=1, token_ids=ids)
        tokens += event.tokens
        await out(event)
    if script.failure is not None:
        raise script.failure
    first, *others = script.finish_reasons or (script.finish_reason,)
    return Completion(first, Usage(len(work.token_ids), tokens, script.cached_tokens), others=tuple(others))


class NoSink:
    """A caller's sink that drops everything."""

    discarded = False

    def planned(self, plan: Plan, model: str) -> None:
        pass

    async def delta(self, delta: Delta) -> None:
        pass

    async def finish(self, answer: Answer) -> None:
        raise AssertionError("the journey ends an answer")

    async def fail(self, error: PublicError) -> None:
        raise AssertionError("the journey fails a request")


def streamed(work: Work, sink: Sink) -> AnswerStream:
    """The answer to a caller who streams, as the journey makes it for this work."""
    request = GenerateRequest(
        request_id="req_1",
        generation_id=work.generation_id,
        contract=Contract.NATIVE,
        caller=Caller("acme", CallerRole.CALLER, "key_1"),
        arrived_at=0.0,
        created=1_700_000_000,
        messages=(Message(Role.USER, "Hello"),),
        sampling=work.sampling,
        stream=True,
    )
    stream = AnswerStream(request, sink, lambda: 0.0)
    counts = SectionCounts(recent_turns=len(work.token_ids))
    stream.started(AnswerOrigin("local", "scripted", "scripted", Plan((), (), counts, 500, 0), 500))
    return stream
