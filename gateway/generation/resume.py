"""Resuming a broken answer on a backend: which modes it offers, and the output joined to the stream."""

from msgspec.structs import replace

from gateway.backends.port import Backend, Continue
from gateway.contracts.events import Delta
from gateway.contracts.values import FormatType
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.job import Job
from resilience.failures import BackendFailure, FailureKind
from resilience.resume import (
    Mismatch,
    ResumeMode,
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
    return resume_modes(
        takes_ids=Continue.TOKENS in ways,
        ids_known=stream.token_ids is not None and backend.model == origin.model,
        takes_text=Continue.TEXT in ways and bool(origin.plan.messages),
    )


def resumes_exactly(backend: Backend, job: Job) -> bool:
    """Whether ``backend`` could exactly resume an answer that it is about to begin, if that breaks off."""
    return Continue.TOKENS in backend.continues and _resumable(backend, job)


def _resumable(backend: Backend, job: Job) -> bool:
    shaped = job.request.response_format.type is not FormatType.TEXT
    return job.request.sampling.n == 1 and (not shaped or Continue.SHAPED in backend.continues)


def resumption_on(backend: Backend, job: Job, stream: AnswerStream, spelling: Spelling) -> Resumption | None:
    """The best way in which ``backend`` can resume what ``stream`` has; ``None`` when there is none."""
    modes, text, sampling = modes_on(backend, job, stream), stream.text(), job.request.sampling
    # The engine in process draws by seed and position.
    repeats = sampling.temperature == 0 or (
        sampling.seed is not None and Continue.SHAPED in backend.continues
    )
    ids = stream.token_ids or ()
    return plan_resumption(modes, text, ids, sampling.stop, spelling, repeats=repeats)


class SplicedStream:
    """Passes on the part of a resumed call's output that the caller does not have."""

    __slots__ = ("_splice", "_stream")

    def __init__(self, stream: AnswerStream, splice: Splice) -> None:
        self._stream = stream
        self._splice = splice

    async def take(self, delta: Delta) -> None:
        """Pass one piece on.

        Raises:
            BackendFailure: ``stream_broken``: it does not fit what the caller has.
        """
        if not self._splice.joined:
            try:
                delta = replace(delta, text=self._splice.take(delta.text, delta.token_ids))
            except Mismatch:
                raise _mismatch() from None
        await self._stream.take(delta)

    async def end(self) -> None:
        """Pass on what is still held; raises as :meth:`take`."""
        try:
            held = self._splice.end()
        except Mismatch:
            raise _mismatch() from None
        if held:
            await self._stream.take(Delta(held, 0))


def _mismatch() -> BackendFailure:
    return BackendFailure(FailureKind.STREAM_BROKEN, "the repeated text differs from the delivered text")
