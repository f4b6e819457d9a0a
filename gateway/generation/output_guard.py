"""Inspects answers during generation: a degenerate one is requested again, ended or failed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.backends.lora_slots import PARAM
from gateway.backends.port import Backend, Completion, DeltaSink, Work
from gateway.contracts.values import FinishReason, Usage
from gateway.generation.answer_stream import AnswerStream
from resilience.blame import Blame
from resilience.degenerate import Action, DegenerateLimits, Detector, Sign
from resilience.events import Degenerated
from resilience.failures import BackendFailure, FailureKind

OFF = Action.OFF  # as a constant, as in ``gateway.contracts.values``
INSPECT_EVERY = 32  # tokens of an answer between two inspections by the detector

_WHAT: Mapping[Sign, str] = {
    Sign.REPETITION: "repeats itself",
    Sign.REPLACEMENT: "is full of replacement characters",
}


@dataclass(frozen=True, slots=True)
class OutputGuard:
    """Generates on a backend and inspects the answer.

    Args:
        action, limits: of a degenerate answer.
        blame: decides whether an adapter or the backend is the cause.
    """

    _action: Action
    _limits: DegenerateLimits
    _emit: Callable[[Degenerated], None]
    _blame: Blame

    async def generate(
        self,
        backend: Backend,
        work: Work,
        stream: AnswerStream,
        out: DeltaSink,
        *,
        may_retry: Callable[[], bool],
        note: Callable[[str], None],
    ) -> Completion:
        """Generate ``work`` on ``backend``.

        Args:
            stream: the answer, which is inspected between two chunks.
            out: takes each chunk, and passes it on to ``stream``.
            may_retry: whether the work may be repeated from the start: the caller has no part of the answer,
                and this was the first attempt.
            note: takes a warning for the caller if the answer is ended.

        Raises:
            BackendFailure: the backend's own; or ``degenerate_output``, with ``no_retry_here`` unless it may
                be tried again. A failure that only an adapter's weights caused is isolated, and names
                ``adapter_id``.
        """
        # An echoed prompt is the caller's own text, and may repeat itself. With ignore_eos, as in load tests,
        # the text after the model's end often repeats itself.
        asked_for = work.sampling.echo or work.sampling.ignore_eos
        inspected = self._action is not OFF and not asked_for
        inspection = _Inspection(self._limits, stream) if inspected else None
        try:
            completion = await backend.generate(work, out)
        except Exception as failure:
            if inspection is None or inspection.sign is None:
                self._isolate(failure, backend, work)
                raise
            # The inspection raised it: the backend has released all resources of this call.
            action, sign = self._choose(work, may_retry), inspection.sign
            self._emit(Degenerated(backend.name, sign, action.value, inspection.tokens))
            if action is not Action.END:
                raise _failure(sign, no_retry_here=action is Action.ABORT) from None
            note(f"the answer was ended after {inspection.tokens} tokens because it {_WHAT[sign]}")
            return inspection.end(work)
        finally:
            stream.inspect, stream.inspect_at = None, math.inf
        self._blame.answered(backend.name, work.adapter.adapter_id if work.adapter is not None else None)
        return completion

    def _isolate(self, failure: Exception, backend: Backend, work: Work) -> None:
        """Isolate a failure that only an adapter's weights caused; it then names the adapter."""
        if not isinstance(failure, BackendFailure) or failure.kind is not FailureKind.NAN_OUTPUT:
            return
        adapter_id = work.adapter.adapter_id if work.adapter is not None else None
        if self._blame.not_numbers(backend.name, adapter_id):
            failure.args = (f"with adapter {adapter_id}: {failure}",)
            failure.param, failure.isolated = PARAM, True

    def _choose(self, work: Work, may_retry: Callable[[], bool]) -> Action:
        if self._action is not Action.RETRY:
            return self._action
        # A greedy request would generate the same again.
        return Action.RETRY if work.sampling.temperature != 0.0 and may_retry() else Action.END


class _Inspection:
    """Inspects the part of an answer that one call generates, until all its texts are degenerate."""

    def __init__(self, limits: DegenerateLimits, stream: AnswerStream) -> None:
        self._stream = stream
        self._detectors = list(map(Detector, (limits,) * len(stream.ids)))
        # By choice, how much of it was inspected: pieces of text, and ids.
        self._seen = [(len(texts), len(ids)) for texts, ids in zip(stream.generated, stream.ids, strict=True)]
        self._degenerate: set[int] = set()
        self._tokens_before = stream.tokens
        self.sign: Sign | None = None
        stream.inspect, stream.inspect_at = self._inspect, stream.tokens + INSPECT_EVERY

    @property
    def tokens(self) -> int:
        return self._stream.tokens - self._tokens_before

    def _inspect(self) -> None:
        """Inspect what came since the last inspection; the pieces together cost a fraction."""
        stream = self._stream
        stream.inspect_at = stream.tokens + INSPECT_EVERY
        all_known = stream.tokens == sum(map(len, stream.ids))
        for index, (texts, ids) in enumerate(zip(stream.generated, stream.ids, strict=True)):
            seen_texts, seen_ids = self._seen[index]
            if len(texts) == seen_texts:
                continue
            self._seen[index] = len(texts), len(ids)
            text, known = "".join(texts[seen_texts:]), tuple(ids[seen_ids:]) if all_known else ()
            sign = self._detectors[index].take(text, len(known) or len(text), known)
            if sign is not None:
                # One degenerate text of several does not end the others.
                self._degenerate.add(index)
                if len(self._degenerate) == len(self._detectors):
                    self.sign = sign
                    raise _failure(sign)

    def end(self, work: Work) -> Completion:
        stream = self._stream
        usage = Usage(work.input_tokens, self.tokens, stream.cached_tokens)
        others = (FinishReason.ERROR,) * (work.sampling.n - 1)
        return Completion(FinishReason.ERROR, usage, stream.queue_wait_s, others)


def _failure(sign: Sign, *, no_retry_here: bool = False) -> BackendFailure:
    return BackendFailure(
        FailureKind.DEGENERATE_OUTPUT, f"the answer {_WHAT[sign]}", no_retry_here=no_retry_here
    )
