"""Passes an answer on to the caller, counts it, and stores what another call needs to resume the answer."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from admission.errors import Refused
from budgeting.values import Plan, ToolCall
from gateway.contracts.events import TAKEN, AnswerFold, Delta, IllegalEvent, Reasoning
from gateway.contracts.values import FinishReason, GenerateRequest, TokenLogprob, Usage
from gateway.generation.commit_buffer import CommitBuffer
from gateway.generation.sink import Sink
from gateway.generation.tool_calls import CallOutcome
from observability.events import ResumeFact
from observability.trace_context import RootSpan
from observability.trace_steps import TraceSteps
from resilience.failures import BackendFailure, FailureKind

_NOTHING: Final = Delta("", 0)


class AnswerOrigin(Struct, frozen=True):
    """The backend, model and prompt of an answer; a call that resumes the answer uses the same prompt.

    Args:
        backend: the backend that generates the answer, or generated it until it failed.
        model: the base model; the adapter is the request's.
        served_model: the id of the answering model: the adapter's, else the base model's.
        plan: the prompt that was sent.
        max_tokens: the total of tokens that each text of the answer may have.
    """

    backend: str
    model: str
    served_model: str
    plan: Plan
    max_tokens: int


class AnswerStream:
    """One request's answer on its way from the backends to the sink.

    Its counts are always current, so an answer that is cut short is billed for exactly the delivered part.
    Only a streaming caller gets chunks as they arrive. Other callers get the whole text at the end, and until
    then all of it can be discarded.

    Args:
        sink: receives the chunks of a stream.
        span: the request's root span, for the headers of calls to workers.

    Attributes:
        chars: characters so far, of text, reasoning and tool calls; a streaming caller has them once they
            are committed.
        committed: whether the caller has a part of the answer.
        started_at: when work was first given to a backend.
        first_at: when the first chunk for the caller arrived.
        admission_wait_s: seconds in admission's queues, including queues that finally refused the request.
        queue_wait_s: seconds in the backend's own queue.
        buffer: holds the first chunks of a stream back.
        resumes: the points at which other calls resumed the answer, in order.
        declined: whether the backend refused the request itself, and so computed nothing of the prompt.
        events: the answer's events; ``None`` while it is only text.
        generated: by choice, all text so far, also of reasoning and of tool calls.
        ids: by choice, the token ids that the backends reported.
        inspect, inspect_at: what inspects the answer before a chunk is taken, once it has so many tokens; it
            may raise, and the chunk is dropped.
        ended: whether the answer's events were checked at its end; not needed for text only.
        call_outcomes: number of tool calls, by outcome.
        steps: the steps towards the answer, for the trace.
    """

    # CPython keeps more than 29 attributes in a dict, which takes longer to make and to read.
    __slots__ = (
        "_arrived_at", "_before_resume", "_cached_tokens", "_choices", "_clock", "_fresh", "_logprobs",
        "_on_first", "_parts", "_sent_logprobs", "_sink", "_streamed", "_unsent", "admission_wait_s",
        "buffer", "call_outcomes", "chars", "committed", "declined", "ended", "events", "first_at",
        "generated", "ids", "inspect", "inspect_at", "origin", "queue_wait_s", "reasoning_tokens",
        "resumes", "started_at", "steps", "tokens",
    )  # fmt: skip

    def __init__(
        self, request: GenerateRequest, sink: Sink, clock: Callable[[], float], span: RootSpan | None = None
    ) -> None:
        self._sink = sink
        self._clock = clock
        self._streamed = request.stream
        self._choices = request.sampling.n
        self._arrived_at = request.arrived_at
        self.buffer: CommitBuffer | None = None
        self._on_first: Callable[[int | None], None] | None = None
        self.resumes: list[ResumeFact] = []
        self.steps = TraceSteps(clock, request.arrived_at, span)
        self.started_at: float | None = None
        self.admission_wait_s = 0.0
        self.committed = self.declined = False
        self.call_outcomes: defaultdict[CallOutcome, int] = defaultdict(int)
        self.inspect: Callable[[], None] | None = None
        self.inspect_at = math.inf
        self._empty()

    def _empty(self) -> None:
        self._fresh = True
        self._unsent = _NOTHING  # the first piece, until its turn to be sent
        self._before_resume: tuple[AnswerOrigin | None, list[int], int] = (None, [], 0)
        self._parts: list[list[str]] = [[] for _ in range(self._choices)]
        self.generated = self._parts  # while there are no events
        self.chars = 0
        self.ids: list[list[int]] = [[] for _ in range(self._choices)]
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._sent_logprobs = 0
        self.events: AnswerFold | None = None
        self.ended = False
        self.tokens = 0
        self.reasoning_tokens = 0
        self._cached_tokens: int | None = None
        self.queue_wait_s = 0.0
        self.first_at: float | None = None
        self.origin: AnswerOrigin | None = None

    @property
    def delivered(self) -> bool:
        """Whether the tenant pays for a part of the answer: not for one that its sink has ``discarded``."""
        return self.committed and not self._sink.discarded

    # Before the first piece

    def refused(self, backend: str, refusal: Refused) -> None:
        self.admission_wait_s += refusal.waited_s
        self.steps.refused(backend, refusal.reason.value)

    @property
    def total_wait_s(self) -> float:
        return self.admission_wait_s + self.queue_wait_s

    def started(self, origin: AnswerOrigin, on_first: Callable[[int | None], None] | None = None) -> None:
        """Record that a backend got the work; ``on_first`` gets the cached tokens with its first chunk."""
        self.origin = origin
        self._on_first = on_first
        self._fresh = True
        self._sink.planned(origin.plan, origin.served_model)
        if self.started_at is None:
            self.started_at = self._clock()

    def stored(self, plan: Plan, model: str) -> None:
        """What follows is a stored text, in the name of ``model``."""
        self._sink.planned(plan, model)

    # Each piece

    def take(self, delta: Delta) -> Awaitable[None]:
        """Count one chunk and pass it on to the sink."""
        if self.tokens >= self.inspect_at and self.inspect is not None:
            self.inspect()
        text, plain = delta.text, delta.__class__ is Delta
        if self.events is None and not plain:
            self.events, self.generated = self._text_so_far(), [list(parts) for parts in self._parts]
        if delta.logprobs:
            delta = self._store_logprobs(delta)
        if self.events is not None:
            self._check(self.events, delta)
            self.generated[delta.index].append(text)
        if plain:
            self._parts[delta.index].append(text)
        if self._fresh:
            self._first_piece(delta)
        self.tokens += delta.tokens
        if delta.token_ids:
            self.ids[delta.index] += delta.token_ids
        self.chars += len(text)
        if not self._streamed:
            return TAKEN
        if self.buffer is not None and self.buffer.holding:
            return self.buffer.take(delta)
        if not self.committed:
            if self._on_first is not None:
                on_first, self._on_first, self._unsent = self._on_first, None, delta
                return self._first_sent(delta, on_first)
            self.committed = bool(text or delta.logprobs)
        return self._sink.delta(delta)

    async def _first_sent(self, delta: Delta, on_first: Callable[[int | None], None]) -> None:
        """Send the first piece before admission learns of it; if the caller reads slowly, it learns first."""
        soon = asyncio.get_running_loop().call_soon(on_first, delta.cached_tokens)
        await self._send_unsent()
        soon.cancel()
        on_first(delta.cached_tokens)  # nothing the second time

    def _first_piece(self, delta: Delta) -> None:
        self._fresh = False
        holding = self.buffer is not None and self.buffer.holding
        if self.first_at is None and not holding:
            self.first_at = self._clock()
        if self._on_first is not None and (holding or self.committed or not self._streamed):
            self._on_first(delta.cached_tokens)
            # Release it: the slot's demand refers to this answer.
            self._on_first = None
        if delta.queue_wait_s is not None:
            self.queue_wait_s = delta.queue_wait_s
        if self._cached_tokens is None:
            # Not counted for a resuming call, whose cache hits may be tokens that this request computed.
            self._cached_tokens = delta.cached_tokens

    def _check(self, events: AnswerFold, event: Delta) -> None:
        """Raise BackendFailure for an event that is out of order."""
        try:
            events.take(event)
        except IllegalEvent as error:
            raise _illegal(error) from None
        if isinstance(event, Reasoning):
            self.reasoning_tokens += event.tokens

    def _text_so_far(self) -> AnswerFold:
        fold = AnswerFold(self._choices)
        for index, pieces in enumerate(self._parts):
            fold.take(Delta("".join(pieces), 0, index=index, logprobs=self.logprobs(index)))
        return fold

    def _store_logprobs(self, delta: Delta) -> Delta:
        stored = self._logprobs.setdefault(delta.index, [])
        # The caller already has the log-probabilities of tokens that a resuming call generates again.
        again = max(0, self._sent_logprobs - len(stored))
        stored.extend(delta.logprobs)
        return replace(delta, logprobs=delta.logprobs[again:]) if again else delta

    @property
    def input_tokens(self) -> int:
        """The tokens of the prompt that a backend got to compute; 0 if none did."""
        return 0 if self.origin is None or self.declined else self.origin.plan.counts.total

    @property
    def cached_tokens(self) -> int:
        """The cached prompt tokens that the first call reported; 0 if no call reported any.

        At most the prompt: a call that resumes the answer for another model may have a shorter one.
        """
        return min(self._cached_tokens or 0, self.input_tokens)

    def used(self, usage: Usage) -> Usage:
        """Return the usage of a resumed answer whose last call reports ``usage``."""
        if self._cached_tokens is None:
            return usage
        cached_tokens = min(self._cached_tokens, usage.input_tokens)
        written = min(usage.cache_write_tokens, usage.input_tokens - cached_tokens)
        return replace(usage, cached_tokens=cached_tokens, cache_write_tokens=written)

    # Commit

    def hold(self, chunks: int, seconds: float) -> None:
        self.buffer = CommitBuffer(self._release, chunks=chunks, seconds=seconds, clock=self._clock)

    async def commit(self) -> None:
        """Send what is held; the sink may cancel an answer here that is not its own any more."""
        if self.buffer is not None:
            await self.buffer.commit()
        if self._streamed:
            await self._send_unsent()

    async def _send_unsent(self) -> None:
        delta, self._unsent = self._unsent, _NOTHING
        self.committed = self.committed or bool(delta.text or delta.logprobs)
        await self._sink.delta(delta)

    async def _release(self, delta: Delta) -> None:
        if self.first_at is None:
            self.first_at = self._clock()
        if delta.text or delta.logprobs:
            self.committed = True
        await self._sink.delta(delta)

    # What another call needs

    @property
    def has_output(self) -> bool:
        return bool(self.chars or self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """The first text's token ids; ``None`` unless the backends reported all of them."""
        ids = self.ids[0]
        return tuple(ids) if len(ids) == self.tokens else None

    def rewind(self) -> None:
        """Discard the answer so far; another one is generated from the start. Not allowed after a commit."""
        if self.committed:
            raise RuntimeError("the caller has a part of this answer; it cannot be taken back")
        if self.buffer is not None:
            self.buffer.discard()
        self._empty()

    def resume(self, token_ids: tuple[int, ...] | None, tokens: int, target: str, mode: str) -> None:
        """Prepare for a call that resumes the answer after ``tokens`` (ids ``None``: they are not known)."""
        self._before_resume = self.origin, self.ids[0], self.tokens
        self._cached_tokens = self._cached_tokens or 0  # a worker reports them with the last chunk only
        stored = self._logprobs.get(0)
        if stored is not None:
            self._sent_logprobs = max(self._sent_logprobs, len(stored))
            if tokens < self.tokens:
                del stored[tokens:]
        self.ids[0], self.tokens = list(token_ids or ()), tokens
        source = self.origin.backend if self.origin is not None else target
        after_ms = (self._clock() - self._arrived_at) * 1000
        self.resumes.append(ResumeFact(after_ms, source, target, mode, self.tokens))

    def resume_failed(self) -> None:
        """Forget the resuming call if it gave nothing: the answer is still the earlier backend's."""
        if self._fresh:
            self.origin, self.ids[0], self.tokens = self._before_resume

    def text(self, index: int = 0) -> str:
        return "".join(self._parts[index]) if index < len(self._parts) else ""

    def reasoning(self, index: int = 0) -> str | None:
        return None if self.events is None else self.events.reasoning(index)

    def tool_calls(self, index: int = 0) -> tuple[ToolCall, ...]:
        return () if self.events is None else self.events.tool_calls(index)

    @property
    def call_count(self) -> int:
        """The number of tool calls so far, of all choices."""
        if self.events is None:
            return 0
        return sum([len(self.events.tool_calls(index)) for index in range(self._choices)])

    def in_call(self, index: int = 0) -> bool:
        """Whether the choice has a tool call that has not ended."""
        return self.events is not None and self.events.in_call(index)

    def end(self, reasons: Sequence[FinishReason]) -> None:
        """End the answer. Raises BackendFailure if its events contradict the finish reasons."""
        try:
            (self.events or AnswerFold(self._choices)).end(reasons)
        except IllegalEvent as error:
            raise _illegal(error) from None
        self.ended = True

    def logprobs(self, index: int = 0) -> tuple[TokenLogprob, ...]:
        return tuple(self._logprobs.get(index, ()))


def _illegal(error: IllegalEvent) -> BackendFailure:
    return BackendFailure(FailureKind.STREAM_BROKEN, f"the answer's events are out of order: {error}")
