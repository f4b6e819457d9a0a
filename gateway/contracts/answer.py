"""The whole answer, from which every public contract makes its own."""

from dataclasses import dataclass

from msgspec import Struct

from budgeting.values import ToolCall
from gateway.contracts.events import AnswerFold, Delta, Reasoning
from gateway.contracts.values import AnswerPart, FinishReason, TokenLogprob, Usage


class Timings(AnswerPart, frozen=True):
    """Milliseconds: the wait in queues, and the time from arrival to the first token and to the end."""

    queue_wait_ms: float
    ttft_ms: float | None
    total_ms: float


class Choice(Struct, frozen=True):
    """One of the ``n`` requested texts; ``logprobs`` has an entry per token if requested and given."""

    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Fallback:
    """How and why the answer did not come from the intended backend."""

    kind: str
    reason: str
    retry_after_ms: int | None = None


class BudgetReport(AnswerPart, frozen=True, omit_defaults=True):
    """The tokens of each section of the prompt, and what the prompt leaves out."""

    system: int
    retrieval: int
    recent_turns: int
    older_summary: int
    generation_reserve: int
    dropped_chunks: tuple[str, ...]
    dropped_turns: int
    # These were added later: an answer has them only if they are not empty.
    cut_chunks: tuple[str, ...] = ()
    merged_chunks: tuple[str, ...] = ()
    summarized_turns: int = 0
    tools: int = 0


class Answer(Struct, frozen=True):
    """The backend-neutral answer. ``backend`` is the backend's kind, ``backend_name`` its name in the config;
    ``adapter_id`` is the adapter that actually answered.

    ``output_text``, ``finish_reason``, ``stop_sequence`` (the stop string that ended it, if known),
    ``logprobs``, ``reasoning`` and ``tool_calls`` belong to the first choice; ``others`` are the others.
    ``context_full``: the backend reports that the context, not ``max_tokens``, ended it.
    ``events`` has the first choice in order; it is empty if there is only text, or reasoning before text.
    """

    request_id: str
    generation_id: str
    backend: str
    backend_name: str
    backend_version: str
    model: str
    trace_id: str
    output_text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    budget: BudgetReport
    created: int
    fallback: Fallback | None = None
    warnings: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    others: tuple[Choice, ...] = ()
    adapter_id: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    stop_sequence: str | None = None
    context_full: bool = False
    events: tuple[Delta, ...] = ()

    @property
    def choices(self) -> tuple[Choice, ...]:
        first = Choice(self.output_text, self.finish_reason, self.logprobs, self.reasoning, self.tool_calls)
        return (first, *self.others)

    @property
    def in_order(self) -> tuple[Delta, ...]:
        """The first choice's events in their order; consecutive pieces are joined."""
        if self.events:
            return self.events
        fold = AnswerFold()
        fold.take(Reasoning(self.reasoning or "", 0))
        fold.take(Delta(self.output_text, 0, logprobs=self.logprobs or ()))
        return fold.in_order()
