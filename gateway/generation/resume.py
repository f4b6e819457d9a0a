"""Resuming a broken answer on a backend: which modes it offers, and the output joined to the stream."""

from msgspec.structs import replace

from budgeting.values import ToolChoiceMode
from gateway.backends.port import Backend, Continue
from gateway.contracts.events import AnswerFold, Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.values import FormatType
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.job import Job
from resilience.failures import BackendFailure, FailureKind
from resilience.resume import (
    Mismatch,
    ResumeMode,
    ResumePoint,
    Resumption,
    Spelling,
    Splice,
    plan_resumption,
    resume_modes,
)


def modes_on(backend: Backend, job: Job, stream: AnswerStream) -> tuple[ResumeMode, ...]:
    """How ``backend`` could resume the answer, the best mode first.

    Cheap: whether the ids really fit the text shows in :func:`resumption_on`.
    """
    ways, origin = backend.continues, stream.origin
    if origin is None or not _resumable(backend, job) or job.required_features - backend.features:
        return ()
    if stream.events is not None and Continue.EVENTS not in ways:
        return ()
    modes = resume_modes(
        takes_ids=Continue.TOKENS in ways,
        ids_known=stream.token_ids is not None and backend.model == origin.model,
        takes_text=Continue.TEXT in ways and bool(origin.plan.messages),
    )
    # Only the ids of all tokens say where reasoning or a call was broken off.
    return modes if stream.events is None else tuple([mode for mode in modes if mode is ResumeMode.EXACT])


def resumes_exactly(backend: Backend, job: Job) -> bool:
    """Whether ``backend`` could exactly resume an answer that it is about to begin, if that breaks off."""
    return Continue.TOKENS in backend.continues and _resumable(backend, job)


def _resumable(backend: Backend, job: Job) -> bool:
    choice = job.request.tool_choice
    must = choice is not None and choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)
    shaped = must or job.request.response_format.type is not FormatType.TEXT
    return job.request.sampling.n == 1 and (not shaped or Continue.SHAPED in backend.continues)


def resumption_on(backend: Backend, job: Job, stream: AnswerStream, spelling: Spelling) -> Resumption | None:
    """The best way in which ``backend`` can resume what ``stream`` has; ``None`` when there is none."""
    modes, text, sampling = modes_on(backend, job, stream), stream.text(), job.request.sampling
    # The engine in process draws by seed and position.
    repeats = sampling.temperature == 0 or (
        sampling.seed is not None and Continue.SHAPED in backend.continues
    )
    ids = stream.token_ids or ()
    if stream.events is not None:
        return Resumption(ResumeMode.EXACT, text, ids, Splice(ResumePoint(ids))) if modes else None
    return plan_resumption(modes, text, ids, sampling.stop, spelling, repeats=repeats)


class EventSplice:
    """Joins the events of a resumed call, which begin at the answer's start, to those that the caller has.

    The pieces may be cut otherwise than before. A call keeps the id that the caller has.
    """

    __slots__ = ("_arguments", "_calls", "_ended", "_reasoning", "_text")

    def __init__(self, text: str, events: AnswerFold) -> None:
        self._text = text
        self._reasoning = events.reasoning() or ""
        self._calls = events.tool_calls()
        self._arguments = [call.arguments for call in self._calls]
        self._ended = len(self._calls) - events.in_call()

    def take(self, event: Delta) -> Delta:
        """The part of an event that the caller lacks; its tokens without text when that is none.

        Raises Mismatch: it does not repeat what the caller has.
        """
        match event:
            case ToolBegin() if event.call < len(self._calls):
                if event.text != self._calls[event.call].name:
                    raise Mismatch
                return _tokens_of(event)
            case ToolArgs() if event.call < len(self._calls):
                rest, self._arguments[event.call] = _after(self._arguments[event.call], event.text)
            case ToolEnd() if event.call < len(self._calls):
                if self._arguments[event.call]:
                    raise Mismatch
                return event if event.call >= self._ended else _tokens_of(event)
            case Reasoning():
                rest, self._reasoning = _after(self._reasoning, event.text)
            case Delta() if type(event) is Delta:
                rest, self._text = _after(self._text, event.text)
            case _:
                return event
        return replace(event, text=rest) if rest else _tokens_of(event)

    def end(self) -> None:
        """The call has ended. Raises Mismatch when it has not repeated all that the caller has."""
        if self._text or self._reasoning or any(self._arguments):
            raise Mismatch


def _after(had: str, text: str) -> tuple[str, str]:
    """What of ``text`` is new where the caller has ``had``, and what of that is still to be repeated."""
    length = min(len(had), len(text))
    if had[:length] != text[:length]:
        raise Mismatch
    return text[length:], had[length:]


def _tokens_of(event: Delta) -> Delta:
    return Delta("", event.tokens, event.cached_tokens, event.queue_wait_s, event.index, (), event.token_ids)


class SplicedStream:
    """Passes on the part of a resumed call's output that the caller does not have."""

    __slots__ = ("_events", "_splice", "_stream")

    def __init__(self, stream: AnswerStream, splice: Splice) -> None:
        self._stream = stream
        self._splice = splice
        self._events = None if stream.events is None else EventSplice(stream.text(), stream.events)

    async def take(self, delta: Delta) -> None:
        """Pass one piece on.

        Raises BackendFailure: ``stream_broken``: it does not fit what the caller has.
        """
        try:
            if self._events is not None:
                delta = self._events.take(delta)
            elif not self._splice.joined:
                delta = replace(delta, text=self._splice.take(delta.text, delta.token_ids))
        except Mismatch:
            raise _mismatch() from None
        await self._stream.take(delta)

    async def end(self) -> None:
        """Pass on what is still held; raises as :meth:`take`."""
        try:
            if self._events is not None:
                self._events.end()
            held = self._splice.end()
        except Mismatch:
            raise _mismatch() from None
        if held:
            await self._stream.take(Delta(held, 0))


def _mismatch() -> BackendFailure:
    return BackendFailure(FailureKind.STREAM_BROKEN, "the repeated text differs from the delivered text")
