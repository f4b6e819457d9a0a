"""Resumes a broken answer on a backend: finds the possible modes, and joins the new output to the stream."""

from collections.abc import Callable

from msgspec.structs import replace

from budgeting.template import split_ending
from gateway.backends.port import Backend, Continue
from gateway.contracts.events import AnswerFold, Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.job import Job
from resilience.failures import CannotResume
from resilience.resume import (
    Mismatch,
    ResumeMode,
    ResumePoint,
    Resumption,
    Spelling,
    Splice,
    plan_resumption,
    resume_modes,
    tokens_of_text,
    without_open_character,
)

_DIFFERS = "the repeated text differs from the delivered text"


def modes_on(backend: Backend, job: Job, stream: AnswerStream) -> tuple[ResumeMode, ...]:
    """Return the modes in which ``backend`` could resume the answer, the best first.

    Cheap: only :func:`resumption_on` checks whether the ids really match the text.
    """
    ways, origin = backend.continues, stream.origin
    if origin is None or not _resumable(backend, job) or job.lacking(backend):
        return ()
    if stream.events is not None and Continue.EVENTS not in ways:
        return ()
    modes = resume_modes(
        takes_ids=Continue.TOKENS in ways,
        ids_known=stream.token_ids is not None and backend.model == origin.model,
        takes_text=Continue.TEXT in ways and bool(origin.plan.messages),
    )
    # Only the ids of all tokens show where reasoning or a call broke off.
    return modes if stream.events is None else tuple([mode for mode in modes if mode is ResumeMode.EXACT])


def resumes_exactly(backend: Backend, job: Job) -> bool:
    """Whether ``backend`` could exactly resume the answer that it is about to begin, if the stream breaks."""
    return Continue.TOKENS in backend.continues and _resumable(backend, job)


def _resumable(backend: Backend, job: Job) -> bool:
    request, ways = job.request, backend.continues
    # The text of an answer with an echoed prompt contains more than what was generated.
    if request.sampling.n > 1 or request.sampling.echo:
        return False
    if (request.tools or job.images or request.template_variables) and Continue.EVENTS not in ways:
        # Workers get messages, and cannot complete an answer beside the ending that the caller asks for.
        ending, _ = split_ending(request.template_kwargs)
        if ending or ways == {Continue.TOKENS}:
            return False
    return not request.is_shaped or Continue.SHAPED in ways


def resumption_on(
    backend: Backend, job: Job, stream: AnswerStream, spelling_of: Callable[[str], Spelling]
) -> Resumption | None:
    """Return the best way for ``backend`` to resume the answer in ``stream``; ``None`` if there is none."""
    spelling = spelling_of(backend.model)
    modes, text, sampling = modes_on(backend, job, stream), stream.text(), job.request.sampling
    # The embedded engine samples by seed and position.
    repeats = sampling.temperature == 0 or (
        sampling.seed is not None and Continue.SHAPED in backend.continues
    )
    ids = stream.token_ids or ()
    if stream.events is not None:
        if repeats or Continue.SHAPED not in backend.continues:
            # vLLM repeats the text of a prompt that ends inside a character.
            ids = without_open_character(ids, spelling.text_bytes)
        return Resumption(ResumeMode.EXACT, text, ids, Splice(ResumePoint(ids)), len(ids)) if modes else None
    tokens, origin = stream.tokens, stream.origin
    if ids and origin is not None and ResumeMode.EXACT not in modes:
        tokens = tokens_of_text(ids, text, spelling_of(origin.model).text_bytes)
    return plan_resumption(modes, text, ids, sampling.stop, spelling, tokens=tokens, repeats=repeats)


class EventSplice:
    """Joins the events of a resuming call, which begin at the answer's start, to those that the caller has.

    The chunk boundaries may differ from before. A tool call keeps the id that the caller has.
    """

    __slots__ = ("_arguments", "_calls", "_ended", "_reasoning", "_text")

    def __init__(self, text: str, events: AnswerFold) -> None:
        self._text = text
        self._reasoning = events.reasoning() or ""
        self._calls = events.tool_calls()
        self._arguments = [call.arguments for call in self._calls]
        self._ended = len(self._calls) - events.in_call()

    def take(self, event: Delta) -> Delta:
        """Return the part of an event that the caller lacks; if there is none, its tokens without text.

        Raises Mismatch if the event does not repeat what the caller has.
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
        """End the resuming call. Raises Mismatch if it has not repeated all that the caller has."""
        if self._text or self._reasoning or any(self._arguments):
            raise Mismatch


def _after(had: str, text: str) -> tuple[str, str]:
    """Return the part of ``text`` after ``had``, and the part of ``had`` that is still to be repeated."""
    length = min(len(had), len(text))
    if had[:length] != text[:length]:
        raise Mismatch
    return text[length:], had[length:]


def _tokens_of(event: Delta) -> Delta:
    figures = event.cached_tokens, event.queue_wait_s, event.index, event.logprobs, event.token_ids
    return Delta("", event.tokens, *figures)


class SplicedStream:
    """Passes on the part of a resuming call's output that the caller does not have."""

    __slots__ = ("_events", "_splice", "_stream")

    def __init__(self, stream: AnswerStream, splice: Splice) -> None:
        self._stream = stream
        self._splice = splice
        self._events = None if stream.events is None else EventSplice(stream.text(), stream.events)

    async def take(self, delta: Delta) -> None:
        """Pass one chunk on.

        Raises CannotResume if the chunk contradicts what the caller has.
        """
        try:
            if self._events is not None:
                delta = self._events.take(delta)
            elif not self._splice.joined:
                delta = replace(delta, text=self._splice.take(delta.text, delta.token_ids))
        except Mismatch:
            raise CannotResume(_DIFFERS) from None
        await self._stream.take(delta)

    async def end(self) -> None:
        """Pass on held text. Raises the errors of :meth:`take`."""
        try:
            if self._events is not None:
                self._events.end()
            held = self._splice.end()
        except Mismatch:
            raise CannotResume(_DIFFERS) from None
        if held:
            await self._stream.take(Delta(held, 0))
