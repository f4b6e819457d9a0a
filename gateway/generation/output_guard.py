"""Inspects answers during generation: a degenerate one is requested again, ended or failed."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import chain

from gateway.backends.lora_slots import PARAM
from gateway.backends.port import Backend, Completion, DeltaSink, Work
from gateway.contracts.events import Delta
from gateway.contracts.values import FinishReason, Usage
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
        out: DeltaSink,
        *,
        may_retry: Callable[[], bool],
        note: Callable[[str], None],
    ) -> Completion:
        """Generate ``work`` on ``backend``.

        Args:
            out: takes each chunk except the one that exceeds a limit.
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
        reader = _Reader(self._limits, work.sampling.n, out) if inspected else None
        try:
            completion = await backend.generate(work, out if reader is None else reader.take)
        except Exception as failure:
            if reader is None or reader.sign is None:
                self._isolate(failure, backend, work)
                raise
            # The reader raised it: the backend has released all resources of this call.
            action = self._choose(work, may_retry)
            self._emit(Degenerated(backend.name, reader.sign, action.value, reader.tokens))
            if action is not Action.END:
                raise _failure(reader.sign, no_retry_here=action is Action.ABORT) from None
            note(f"the answer was ended after {reader.tokens} tokens because it {_WHAT[reader.sign]}")
            return reader.end(work)
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


class _Reader:
    """Passes chunks on until all texts of the answer are degenerate."""

    def __init__(self, limits: DegenerateLimits, n: int, out: DeltaSink) -> None:
        self._detectors = list(map(Detector, (limits,) * n))
        self._chunks: list[Delta] = []  # since the last inspection
        self._without_ids = False  # whether a chunk came without the ids of its tokens
        self._degenerate: set[int] = set()
        self._out = out
        self._inspect_at = INSPECT_EVERY
        self._first: Delta | None = None
        self.sign: Sign | None = None
        self.tokens = 0

    def take(self, delta: Delta) -> Awaitable[None]:
        self._chunks.append(delta)
        tokens = self.tokens + delta.tokens
        if tokens >= self._inspect_at:
            self._inspect()
            self._inspect_at = tokens + INSPECT_EVERY
        self.tokens = tokens
        return self._out(delta)

    def _inspect(self) -> None:
        """Inspect the chunks since the last inspection; together they cost a fraction."""
        chunks, self._chunks = self._chunks, []
        if self._first is None:
            self._first = chunks[0]
        if [one for one in chunks if one.tokens and not one.token_ids]:
            self._without_ids = True
        by_text = [chunks]
        if len(self._detectors) > 1:
            by_text = [[] for _ in self._detectors]
            for one in chunks:
                by_text[one.index].append(one)
        for index, own in enumerate(by_text):
            if not own:
                continue
            detector, text = self._detectors[index], "".join([one.text for one in own])
            ids = () if self._without_ids else tuple(chain.from_iterable([one.token_ids for one in own]))
            sign = detector.take(text, len(ids) or len(text), ids)
            if sign is not None:
                # One degenerate text of several does not end the others.
                self._degenerate.add(index)
                if len(self._degenerate) == len(self._detectors):
                    self.sign = sign
                    raise _failure(sign)

    def end(self, work: Work) -> Completion:
        first = self._first or Delta("", 0)
        cached_tokens, queue_wait_s = first.cached_tokens or 0, first.queue_wait_s or 0.0
        usage = Usage(work.input_tokens, self.tokens, cached_tokens)
        others = (FinishReason.ERROR,) * (work.sampling.n - 1)
        return Completion(FinishReason.ERROR, usage, queue_wait_s, others)


def _failure(sign: Sign, *, no_retry_here: bool = False) -> BackendFailure:
    return BackendFailure(
        FailureKind.DEGENERATE_OUTPUT, f"the answer {_WHAT[sign]}", no_retry_here=no_retry_here
    )
